"""Promotion: gates in, a decision out. Pure; the registry appends what is decided here.

Owns the gates: evaluated under this very suite, finite, and better than the champion under the same suite.
"""

import math
from dataclasses import dataclass

from storage.registry import RegistryState
from storage.registry_entries import Promoted, Refused
from storage.run_entries import CheckpointReference, EvaluationRecorded
from storage.run_state import RunState

METRIC = "val_loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A committed checkpoint offered to an alias, with its evaluation if there is one."""

    run_id: str
    reference: CheckpointReference
    evaluation: EvaluationRecorded | None
    by: str
    hold_id: str | None = None


def best_evaluated(state: RunState, suite_sha256: str) -> EvaluationRecorded | None:
    """Return the evaluation with the lowest finite loss among readable checkpoints of the suite."""
    readable = {record.committed.manifest_sha256 for record in state.readable}
    fitting = [
        item
        for item in reversed(state.evaluations)
        if item.suite_sha256 == suite_sha256
        and item.manifest_sha256 in readable
        and math.isfinite(item.metrics.get(METRIC, math.nan))
    ]
    return min(fitting, key=lambda item: item.metrics[METRIC], default=None)


def decide_promotion(
    registry: RegistryState, candidate: Candidate, *, alias: str, min_improvement: float
) -> Promoted | Refused | None:
    """Return the entry to append, or None where the alias already points at these weights."""
    champion = registry.champion
    if champion is not None and champion.manifest_sha256 == candidate.reference.manifest_sha256:
        return None
    evaluation = candidate.evaluation
    if evaluation is None:
        return _refused(candidate, alias, "evaluated", "no evaluation of these weights under the required suite")
    loss = evaluation.metrics.get(METRIC, math.nan)
    if not math.isfinite(loss):
        return _refused(candidate, alias, "finite", f"{METRIC} is {loss}")
    if champion is not None:
        if champion.suite_sha256 != evaluation.suite_sha256:
            detail = "the champion was measured under another suite; evaluate it under this one or choose another alias"
            return _refused(candidate, alias, "comparable", detail)
        if not loss <= champion.metrics[METRIC] - min_improvement or loss == champion.metrics[METRIC]:
            best = champion.metrics[METRIC]
            detail = f"{METRIC} {loss:.4f} must be below the champion's {best:.4f} by {min_improvement:g}"
            return _refused(candidate, alias, "better", detail)
    return Promoted(
        alias=alias,
        run_id=candidate.run_id,
        step=candidate.reference.step,
        prefix=candidate.reference.prefix,
        manifest_sha256=candidate.reference.manifest_sha256,
        suite_sha256=evaluation.suite_sha256,
        metrics=evaluation.metrics,
        by=candidate.by,
        why=f"{METRIC} {loss:.4f}" + (f", before {champion.metrics[METRIC]:.4f}" if champion else ", the first one"),
        previous=champion.manifest_sha256 if champion else None,
        hold_id=candidate.hold_id,
    )


def refuse_unreadable(candidate: Candidate, alias: str) -> Refused:
    """Return the refusal of a checkpoint that is no longer committed: nothing holds its bytes."""
    return _refused(candidate, alias, "readable", "the run's log no longer calls this checkpoint committed")


def _refused(candidate: Candidate, alias: str, gate: str, detail: str) -> Refused:
    return Refused(
        alias=alias,
        run_id=candidate.run_id,
        step=candidate.reference.step,
        manifest_sha256=candidate.reference.manifest_sha256,
        gate=gate,
        detail=detail,
        by=candidate.by,
        hold_id=candidate.hold_id,
    )
