"""The evaluations of a run: one record for each, recorded or failed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from storage.logs.run_entries import CurveVerdict, EvaluationFailed, EvaluationRecorded
from storage.logs.run_state import RunState
from storage.stores.document import project

VAL_LOSS = "val_loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSummary:
    """The result of one evaluation of exact weights under an exact suite; `status` is recorded or failed."""

    step: int
    manifest_sha256: str
    suite: str
    suite_sha256: str
    data_snapshot: str
    status: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: tuple[str, ...] = ()
    evaluator_version: str | None = None
    boundary: str | None = None
    started_at: datetime
    seconds: float
    detail: str | None = None
    verdict: CurveVerdict | None = None


def list_evaluations(state: RunState) -> tuple[EvaluationSummary, ...]:
    """Return recorded and failed evaluations in the order in which they started."""
    summaries = [summarize_evaluation(item) for item in state.evaluations]
    summaries += [summarize_evaluation(item) for item in state.failed_evaluations]
    return tuple(sorted(summaries, key=lambda summary: summary.started_at))


def comparable_evaluations(state: RunState) -> tuple[EvaluationRecorded, ...]:
    """Return those of the surviving checkpoints in step order, all measured by one suite: the one used most often."""
    kept = {record.committed.manifest_sha256 for record in state.surviving_checkpoints}
    measured = [item for item in state.evaluations if item.manifest_sha256 in kept and VAL_LOSS in item.metrics]
    suites = [item.suite_sha256 for item in measured]
    return state.surviving_evaluations(max(reversed(suites), key=suites.count, default=""))


def summarize_evaluation(item: EvaluationRecorded | EvaluationFailed) -> EvaluationSummary:
    """Return one evaluation; a failed one has a detail and no metrics."""
    if isinstance(item, EvaluationFailed):
        return project(item, EvaluationSummary, status="failed")
    return project(item, EvaluationSummary, status="recorded", boundary=item.boundary or None)
