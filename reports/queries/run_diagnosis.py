"""The answer of `cairn diagnose`: the verdict on a run's loss curve now, and the verdict at each evaluation."""

from dataclasses import dataclass

from cairn.reports.queries.evaluations import EvaluationSummary, summarize_evaluation
from cairn.reports.queries.run_status import stopped_early
from cairn.storage.logs.run_entries import CurveVerdict
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.configuration.settings import METRIC
from cairn.tasks.evaluator.evaluation_run import curve_suite, read_curve
from cairn.tasks.policy.curve_verdict import judge


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The verdict on the recorded steps up to `step`; the evaluations of the curve's suite have those before it."""

    run_id: str
    step: int
    total_steps: int
    verdict: CurveVerdict
    stopped_early: str | None
    evaluations: tuple[EvaluationSummary, ...]


def diagnose_run(log: RunLog) -> Diagnosis:
    """Return the diagnosis of a run that was read; raises `StorageError` where its step records cannot be read."""
    suite_sha256 = curve_suite(log.state)
    curve = read_curve(log, suite_sha256=suite_sha256)
    measured = (item for item in log.state.surviving_evaluations(suite_sha256) if METRIC in item.metrics)
    return Diagnosis(
        run_id=log.run_id,
        step=curve.steps[-1] if curve.steps else 0,
        total_steps=curve.total_steps,
        verdict=judge(curve),
        stopped_early=stopped_early(log.state),
        evaluations=tuple(map(summarize_evaluation, measured)),
    )
