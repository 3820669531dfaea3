"""The answer of `cairn diagnose`: the verdict on a run's loss curve now, and the verdict at each evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass

from cairn.reports.queries.run_status import stopped_early
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.document import project
from cairn.tasks.configuration.settings import METRIC
from cairn.tasks.evaluator.evaluation_run import curve_suite, read_curve
from cairn.tasks.policy.curve_verdict import judge
from cairn.tasks.text import format, output


@dataclass(frozen=True, kw_only=True, slots=True)
class PastVerdict:
    """The verdict at an evaluation; losses in nats per token, None where unknown."""

    step: int
    val_loss: float
    train_loss: float | None
    kind: str | None
    why: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The verdict on the recorded steps up to `step`, with its numbers and usual cures, and the verdicts before it."""

    run_id: str
    step: int
    total_steps: int
    verdict: str
    why: str
    numbers: Mapping[str, float]
    cures: tuple[str, ...]
    stopped_early: str | None
    evaluations: tuple[PastVerdict, ...]


def diagnose_run(log: RunLog) -> Diagnosis:
    """Return the diagnosis of a run that was read; raises `StorageError` where its step records cannot be read."""
    suite_sha256 = curve_suite(log.state)
    curve = read_curve(log, suite_sha256=suite_sha256)
    verdict = judge(curve)
    return project(
        verdict,
        Diagnosis,
        run_id=log.run_id,
        step=curve.steps[-1] if curve.steps else 0,
        total_steps=curve.total_steps,
        verdict=verdict.kind,
        stopped_early=stopped_early(log.state),
        evaluations=tuple(
            PastVerdict(
                step=item.step,
                val_loss=item.metrics[METRIC],
                train_loss=item.verdict.numbers.get("train_loss") if item.verdict else None,
                kind=item.verdict.kind if item.verdict else None,
                why=item.verdict.why if item.verdict else None,
            )
            for item in log.state.surviving_evaluations(suite_sha256)
            if METRIC in item.metrics
        ),
    )


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the verdict, its numbers and its cures, and a row for each evaluation."""
    numbers = ", ".join(f"{name} {format.format_value(value)}" for name, value in diagnosis.numbers.items())
    facts: list[tuple[str, object]] = [
        ("run", diagnosis.run_id),
        ("step", f"{diagnosis.step} of {diagnosis.total_steps}"),
        ("verdict", diagnosis.verdict),
        ("why", diagnosis.why),
        ("numbers", numbers or None),
        *((f"cure {number}", cure) for number, cure in enumerate(diagnosis.cures, start=1)),
    ]
    if diagnosis.stopped_early:
        facts.append(("ended", diagnosis.stopped_early))
    output.print_facts(facts)
    print()
    rows = [(item.step, item.val_loss, item.train_loss, item.kind, item.why) for item in diagnosis.evaluations]
    output.print_table(("step", "val_loss", "train_loss", "verdict", "why"), rows, empty="no evaluations yet")
