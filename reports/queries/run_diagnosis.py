"""The answer of `cairn diagnose`: the verdict on a run's curve now, and the one each evaluation came with.

Owns the JSON fields. Everything is read from the log and the step records; refuses torch and the orchestrator.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from reports.queries.run_status import stopped_early
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from tasks.evaluator.run_curve import curve_suite, read_curve
from tasks.policy.curve_verdict import judge
from tasks.policy.promotion import METRIC
from tasks.text.format import format_value
from tasks.text.output import print_facts, print_table

_COLUMNS = ("step", "val_loss", "train_loss", "verdict", "why")


@dataclass(frozen=True, kw_only=True, slots=True)
class PastVerdict:
    """The verdict an evaluation came with; losses in nats per token, None where not known."""

    step: int
    val_loss: float
    train_loss: float | None
    kind: str | None
    why: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The verdict on everything on record up to `step`, with its numbers and cures, and the verdicts before it."""

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
    """Return the diagnosis of a run that was read; raises `StorageError` where its step records cannot be."""
    suite_sha256 = curve_suite(log.state)
    curve = read_curve(log, suite_sha256=suite_sha256)
    verdict = judge(curve)
    return Diagnosis(
        run_id=log.run_id,
        step=curve.steps[-1] if curve.steps else 0,
        total_steps=curve.total_steps,
        verdict=verdict.kind,
        why=verdict.why,
        numbers=verdict.numbers,
        cures=verdict.cures,
        stopped_early=stopped_early(log.state),
        evaluations=_past_verdicts(log.state, suite_sha256),
    )


def print_diagnosis(view: Diagnosis) -> None:
    """Print the verdict, its numbers and its cures, and a row for each evaluation."""
    numbers = ", ".join(f"{name} {format_value(value)}" for name, value in view.numbers.items())
    facts: list[tuple[str, object]] = [
        ("run", view.run_id),
        ("step", f"{view.step} of {view.total_steps}"),
        ("verdict", view.verdict),
        ("why", view.why),
        ("numbers", numbers or None),
        *((f"cure {number}", cure) for number, cure in enumerate(view.cures, start=1)),
    ]
    if view.stopped_early:
        facts.append(("ended", view.stopped_early))
    print_facts(facts)
    print()
    rows = [(item.step, item.val_loss, item.train_loss, item.kind, item.why) for item in view.evaluations]
    print_table(_COLUMNS, rows, empty="no evaluations yet")


def _past_verdicts(state: RunState, suite_sha256: str | None) -> tuple[PastVerdict, ...]:
    """Return the newest verdict of every evaluated checkpoint of the surviving line, in step order."""
    newest = {
        item.manifest_sha256: item
        for item in state.evaluations
        if item.suite_sha256 == suite_sha256 and METRIC in item.metrics
    }
    line = [record.committed.manifest_sha256 for record in state.surviving_line]
    found = [newest[manifest] for manifest in line if manifest in newest]
    return tuple(
        PastVerdict(
            step=item.step,
            val_loss=item.metrics[METRIC],
            train_loss=item.verdict.numbers.get("train_loss") if item.verdict else None,
            kind=item.verdict.kind if item.verdict else None,
            why=item.verdict.why if item.verdict else None,
        )
        for item in found
    )
