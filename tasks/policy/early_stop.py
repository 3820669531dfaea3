"""Early stopping: a pure function from a run's log to the step at which it stops, or None.

Only the scheduled evaluations count, in step order up to the first outstanding one; one that failed as often as its
budget allows, or whose checkpoint was deleted before it, is skipped. Source: Prechelt, Early Stopping - But When? 1998.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from cairn.storage.logs import run_entries, run_state
from cairn.tasks.configuration import settings, stored_configuration
from cairn.tasks.policy import budgets, curve_verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """The step at which a run stops, the policy's rule, and the numbers behind it."""

    step: int
    rule: str
    why: str


class StopTerms:
    """The rules of an attempt's stored configuration on evaluations, and on early stops by those of one suite."""

    def __init__(self, config: Mapping[str, Any], suite_sha256: str) -> None:
        """Validate the configuration; raises `IntegrityError` if it is invalid."""
        self.config, self.suite_sha256 = stored_configuration.parse_stored_configuration(config), suite_sha256

    def is_due(self, step: int) -> bool:
        """Whether an evaluation is scheduled at this step."""
        return step % (self.config.checkpoint.every_steps * self.config.evaluation.every_commits) == 0


def find_stop(state: run_state.RunState, suite_sha256: str) -> Stop | None:
    """Return where the run stops early under the policy of its newest attempt, or None."""
    if not state.attempts or state.opened is None or state.finished is not None:
        return None
    terms = StopTerms(state.attempts[-1].started.config, suite_sha256)
    if not terms.config.early_stop.is_on:
        return None
    line = state.surviving_checkpoints  # all of the history
    if not line or line[-1].committed.step >= state.opened.total_steps:
        return None
    known = first_results(state, suite_sha256)
    awaited = {record.committed.manifest_sha256 for record in outstanding(state, terms)}
    due = [record.committed.manifest_sha256 for record in line if terms.is_due(record.committed.step)]
    answered = takewhile(lambda manifest: manifest not in awaited, due)
    return decide(terms.config.early_stop, [known[manifest] for manifest in answered if manifest in known])


def outstanding(state: run_state.RunState, terms: StopTerms) -> tuple[run_state.CheckpointRecord, ...]:
    """Return the checkpoints whose scheduled evaluation is missing but still possible, in step order."""
    known = first_results(state, terms.suite_sha256)
    budget = budgets.evaluator_budget(terms.config.budgets.evaluator_failed, state.failed_evaluations)
    return tuple(
        record
        for record in state.surviving_checkpoints
        if record.is_committed and terms.is_due(record.committed.step)
        if record.committed.manifest_sha256 not in known
        if sum(item.suite_sha256 == terms.suite_sha256 for item in record.failed_evaluations) <= budget.retries
    )


def decide(policy: settings.EarlyStopConfig, evaluations: Iterable[run_entries.EvaluationRecorded]) -> Stop | None:
    """Return the first stop among the evaluations (in step order), or None."""
    best, best_step, waited, overfit = math.inf, 0, 0, 0
    for item in evaluations:
        step, loss = item.step, item.metrics.get(settings.METRIC, math.nan)
        kind, why = (item.verdict.kind, item.verdict.why) if item.verdict else ("", "")
        waited += 1
        if loss < best - policy.min_delta:
            best, best_step, waited = loss, step, 0
        train = item.verdict.numbers.get("train_loss") if item.verdict else None
        overfit = overfit + 1 if train is not None and loss >= policy.overfit_ratio * train else 0
        if policy.on_divergence and kind == curve_verdict.VerdictKind.DIVERGING:
            return Stop(step=step, rule="on_divergence", why=f"diverging: {why}")
        if policy.on_stuck and kind == curve_verdict.VerdictKind.STUCK:
            return Stop(step=step, rule="on_stuck", why=f"stuck: {why}")
        if policy.overfit_ratio and overfit >= policy.overfit_patience:
            ratio = f"{loss / max(train or 0.0, 1e-9):.2f} × train loss {train or 0.0:.4f}"
            least = f"{policy.overfit_ratio:g} × for {policy.overfit_patience} evaluations"
            return Stop(step=step, rule="overfit_ratio", why=f"val loss {loss:.4f} is {ratio}, at least {least}")
        if policy.patience and waited >= policy.patience:
            least = f" by more than {policy.min_delta:g}" if policy.min_delta else ""
            words = f"val loss {loss:.4f}: {waited} evaluations without improving{least} on {best:.4f}"
            return Stop(step=step, rule="patience", why=f"{words} at step {best_step}")
    return None


def finish(last: run_entries.CheckpointCommitted, attempt: int, stop: Stop | None) -> run_entries.RunFinished:
    """Return the entry that finishes a run with this commit, early if there is a stop."""
    return run_entries.RunFinished(
        attempt=attempt,
        step=last.step,
        manifest_sha256=last.manifest_sha256,
        state_sha256=last.state_sha256,
        stopped=stop.why if stop else "",
        rule=stop.rule if stop else "",
    )


def first_results(state: run_state.RunState, suite_sha256: str) -> dict[str, run_entries.EvaluationRecorded]:
    """Return the first evaluation of each manifest; a later one that a person asked for moves no decision."""
    return {item.manifest_sha256: item for item in reversed(state.evaluations) if item.suite_sha256 == suite_sha256}
