"""The answer of `cairn diagnose`: the verdict on a run's loss curve now, and the verdict at each evaluation."""

from dataclasses import dataclass

from cairn.reports.queries.evaluations import EvaluationSummary, summarize_evaluation
from cairn.reports.queries.run_status import stopped_early
from cairn.storage.logs.run_entries import CurveVerdict
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.configuration.settings import METRIC
from cairn.tasks.evaluator.evaluation_run import curve_suite, read_curve
from cairn.tasks.policy.curve_verdict import judge
from cairn.tasks.text import format, output


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


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the verdict, its numbers and its cures, and a row for each evaluation."""
    verdict = diagnosis.verdict
    numbers = ", ".join(f"{name} {format.format_value(value)}" for name, value in verdict.numbers.items())
    facts: list[tuple[str, object]] = [
        ("run", diagnosis.run_id),
        ("step", f"{diagnosis.step} of {diagnosis.total_steps}"),
        ("verdict", verdict.kind),
        ("why", verdict.why),
        ("numbers", numbers or None),
        *((f"cure {number}", cure) for number, cure in enumerate(verdict.cures, start=1)),
    ]
    if diagnosis.stopped_early:
        facts.append(("ended", diagnosis.stopped_early))
    output.print_facts(facts)
    print()
    rows = []
    for item in diagnosis.evaluations:
        then = item.verdict or CurveVerdict(kind="–", why="–")
        rows.append((item.step, item.metrics[METRIC], then.numbers.get("train_loss"), then.kind, then.why))
    output.print_table(("step", "val_loss", "train_loss", "verdict", "why"), rows, empty="no evaluations yet")
