"""The evaluations of a run: one record for each, recorded or failed."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from storage.logs.run_entries import CurveVerdict, EvaluationFailed, EvaluationRecorded
from storage.logs.run_state import RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSummary:
    """The result of one evaluation of exact weights under an exact suite; `status` is recorded or failed."""

    step: int
    manifest_sha256: str
    suite: str
    suite_sha256: str
    data_snapshot: str
    status: str
    metrics: Mapping[str, float]
    samples: tuple[str, ...]
    evaluator_version: str | None
    boundary: str | None
    started_at: datetime
    seconds: float
    detail: str | None
    verdict: CurveVerdict | None = None


def list_evaluations(state: RunState) -> tuple[EvaluationSummary, ...]:
    """Return recorded and failed evaluations in the order in which they started."""
    summaries = [summarize_evaluation(item) for item in state.evaluations]
    summaries += [summarize_evaluation(item) for item in state.failed_evaluations]
    return tuple(sorted(summaries, key=lambda summary: summary.started_at))


def summarize_evaluation(item: EvaluationRecorded | EvaluationFailed) -> EvaluationSummary:
    """Return one evaluation; a failed one has a detail and no metrics."""
    recorded = item if isinstance(item, EvaluationRecorded) else None
    return EvaluationSummary(
        step=item.step,
        manifest_sha256=item.manifest_sha256,
        suite=item.suite,
        suite_sha256=item.suite_sha256,
        data_snapshot=item.data_snapshot,
        status="recorded" if recorded else "failed",
        metrics=recorded.metrics if recorded else {},
        samples=recorded.samples if recorded else (),
        evaluator_version=recorded.evaluator_version if recorded else None,
        boundary=recorded.boundary or None if recorded else None,
        started_at=item.started_at,
        seconds=item.seconds,
        detail=item.detail if isinstance(item, EvaluationFailed) else None,
        verdict=recorded.verdict if recorded else None,
    )
