"""Early stopping: a pure function from a run's log to the step at which it stops, or None.

Evaluations overlap later segments, so the time at which a stop is noticed varies, but not its step. Only the scheduled
evaluations count, in step order up to the first outstanding one. An evaluation that failed as often as its budget
allows, or whose checkpoint was deleted before it, is skipped. A run that has trained its last step does not stop early.
Source: Prechelt, Early Stopping - But When?, 1998.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.logs.run_entries import EvaluationRecorded
from storage.logs.run_state import CheckpointRecord, RunState
from tasks.configuration.evaluation_settings import EarlyStopConfig, EvaluationConfig
from tasks.configuration.settings import BudgetsConfig, CheckpointConfig
from tasks.policy.budgets import evaluator_retries_left
from tasks.policy.curve_verdict import VerdictKind
from tasks.policy.promotion import METRIC


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedStep:
    """One evaluation as the policy sees it; losses in nats per token, None if unknown."""

    step: int
    val_loss: float
    train_loss: float | None = None
    verdict: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """The step at which a run stops, the policy's rule, and the numbers behind it."""

    step: int
    rule: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StopTerms:
    """The policy, its suite, and the steps between scheduled evaluations."""

    policy: EarlyStopConfig
    suite_sha256: str
    every_steps: int
    evaluator_retries: BudgetsConfig

    def is_due(self, step: int) -> bool:
        """Whether an evaluation is scheduled at this step."""
        return step % self.every_steps == 0


def stop_terms(config: Mapping[str, Any], suite_sha256: str) -> StopTerms:
    """Return the terms of a run's stored configuration; missing keys have their defaults."""
    checkpoint = config.get("checkpoint", {})
    every_steps = checkpoint.get("every_steps") or CheckpointConfig.model_fields["every_steps"].default
    every_commits = config.get("evaluation", {}).get("every_commits", EvaluationConfig().every_commits)
    return StopTerms(
        policy=EarlyStopConfig.model_validate(config.get("early_stop", {})),
        suite_sha256=suite_sha256,
        every_steps=every_steps * every_commits,
        evaluator_retries=BudgetsConfig.model_validate(config.get("budgets", {})),
    )


def find_stop(state: RunState, suite_sha256: str) -> Stop | None:
    """Return where the run stops early under the policy of its newest attempt, or None."""
    if not state.attempts or state.opened is None or state.finished is not None:
        return None
    terms, total = stop_terms(state.attempts[-1].started.config, suite_sha256), state.opened.total_steps
    line = state.surviving_checkpoints
    if not terms.policy.is_on or not line or line[-1].committed.step >= total:
        return None
    return decide(terms.policy, tuple(_evaluated_steps(state, terms)))


def outstanding(state: RunState, terms: StopTerms) -> tuple[CheckpointRecord, ...]:
    """Return the checkpoints whose scheduled evaluation is missing but still possible, in step order."""
    known = _recorded(state, terms.suite_sha256)
    return tuple(record for record in _due(state, terms) if _is_outstanding(state, terms, record, known))


def decide(policy: EarlyStopConfig, evaluations: Sequence[EvaluatedStep]) -> Stop | None:
    """Return the first stop among the evaluations (in step order), or None."""
    best, waited, overfit = math.inf, 0, 0
    best_step = 0
    for item in evaluations:
        if item.val_loss < best - policy.min_delta:
            best, best_step, waited = item.val_loss, item.step, 0
        else:
            waited += 1
        overfit = overfit + 1 if _is_overfit(policy, item) else 0
        if policy.on_divergence and item.verdict == VerdictKind.DIVERGING:
            return Stop(step=item.step, rule="on_divergence", why=f"diverging: {item.why}")
        if policy.on_stuck and item.verdict == VerdictKind.STUCK:
            return Stop(step=item.step, rule="on_stuck", why=f"stuck: {item.why}")
        if policy.overfit_ratio and overfit >= policy.overfit_patience:
            return Stop(step=item.step, rule="overfit_ratio", why=_overfit_words(policy, item))
        if policy.patience and waited >= policy.patience:
            least = f" by more than {policy.min_delta:g}" if policy.min_delta else ""
            words = f"val loss {item.val_loss:.4f}: {waited} evaluations without improving{least} on {best:.4f}"
            return Stop(step=item.step, rule="patience", why=f"{words} at step {best_step}")
    return None


def _is_overfit(policy: EarlyStopConfig, item: EvaluatedStep) -> bool:
    return item.train_loss is not None and item.val_loss >= policy.overfit_ratio * item.train_loss


def _overfit_words(policy: EarlyStopConfig, item: EvaluatedStep) -> str:
    train = item.train_loss or 0.0
    return (
        f"val loss {item.val_loss:.4f} is {item.val_loss / max(train, 1e-9):.2f} × train loss {train:.4f}, at least "
        f"{policy.overfit_ratio:g} × for {policy.overfit_patience} evaluations"
    )


def _evaluated_steps(state: RunState, terms: StopTerms) -> Iterator[EvaluatedStep]:
    known = _recorded(state, terms.suite_sha256)
    for record in _due(state, terms):
        if _is_outstanding(state, terms, record, known):
            return
        item = known.get(record.committed.manifest_sha256)
        if item is None:
            continue
        verdict = item.verdict
        yield EvaluatedStep(
            step=item.step,
            val_loss=item.metrics.get(METRIC, math.nan),
            train_loss=verdict.numbers.get("train_loss") if verdict else None,
            verdict=verdict.kind if verdict else "",
            why=verdict.why if verdict else "",
        )


def _recorded(state: RunState, suite_sha256: str) -> dict[str, EvaluationRecorded]:
    # The first result counts; a later one that a person asked for moves no stop.
    found: dict[str, EvaluationRecorded] = {}
    for item in state.evaluations:
        if item.suite_sha256 == suite_sha256:
            found.setdefault(item.manifest_sha256, item)
    return found


def _due(state: RunState, terms: StopTerms) -> Iterator[CheckpointRecord]:
    return (record for record in state.surviving_checkpoints if terms.is_due(record.committed.step))


def _is_outstanding(
    state: RunState, terms: StopTerms, record: CheckpointRecord, known: Mapping[str, EvaluationRecorded]
) -> bool:
    manifest = record.committed.manifest_sha256
    if manifest in known or not record.is_committed:
        return False
    budget = terms.evaluator_retries.evaluator_failed
    return evaluator_retries_left(budget, state.failed_evaluations, manifest, terms.suite_sha256) > 0
