"""Early stopping: a pure function from a run's log to the step at which it stops, or None.

Evaluations overlap later segments, so the time at which a stop is noticed varies, but not its step. Only the scheduled
evaluations count, in step order up to the first outstanding one. An evaluation that failed as often as its budget
allows, or whose checkpoint was deleted before it, is skipped. A run that has trained its last step does not stop early.
Source: Prechelt, Early Stopping - But When?, 1998.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
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
    return decide(terms.policy, _scheduled_evaluations(state, terms))


def outstanding(state: RunState, terms: StopTerms) -> tuple[CheckpointRecord, ...]:
    """Return the checkpoints whose scheduled evaluation is missing but still possible, in step order."""
    known = _recorded(state, terms.suite_sha256)
    return tuple(record for record in _due(state, terms) if _is_outstanding(state, terms, record, known))


def decide(policy: EarlyStopConfig, evaluations: Iterable[EvaluationRecorded]) -> Stop | None:
    """Return the first stop among the evaluations (in step order), or None."""
    best, best_step, waited, overfit = math.inf, 0, 0, 0
    for item in evaluations:
        step, loss = item.step, item.metrics.get(METRIC, math.nan)
        kind, why = (item.verdict.kind, item.verdict.why) if item.verdict else ("", "")
        if loss < best - policy.min_delta:
            best, best_step, waited = loss, step, 0
        else:
            waited += 1
        train = item.verdict.numbers.get("train_loss") if item.verdict else None
        overfit = overfit + 1 if train is not None and loss >= policy.overfit_ratio * train else 0
        if policy.on_divergence and kind == VerdictKind.DIVERGING:
            return Stop(step=step, rule="on_divergence", why=f"diverging: {why}")
        if policy.on_stuck and kind == VerdictKind.STUCK:
            return Stop(step=step, rule="on_stuck", why=f"stuck: {why}")
        if policy.overfit_ratio and overfit >= policy.overfit_patience:
            return Stop(step=step, rule="overfit_ratio", why=_overfit_words(policy, loss, train or 0.0))
        if policy.patience and waited >= policy.patience:
            least = f" by more than {policy.min_delta:g}" if policy.min_delta else ""
            words = f"val loss {loss:.4f}: {waited} evaluations without improving{least} on {best:.4f}"
            return Stop(step=step, rule="patience", why=f"{words} at step {best_step}")
    return None


def _overfit_words(policy: EarlyStopConfig, loss: float, train: float) -> str:
    return (
        f"val loss {loss:.4f} is {loss / max(train, 1e-9):.2f} × train loss {train:.4f}, at least "
        f"{policy.overfit_ratio:g} × for {policy.overfit_patience} evaluations"
    )


def _scheduled_evaluations(state: RunState, terms: StopTerms) -> Iterator[EvaluationRecorded]:
    known = _recorded(state, terms.suite_sha256)
    for record in _due(state, terms):
        if _is_outstanding(state, terms, record, known):
            return
        if (item := known.get(record.committed.manifest_sha256)) is not None:
            yield item


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
