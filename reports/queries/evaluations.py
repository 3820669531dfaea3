"""The evaluations of a run, recorded or failed; those of a checkpoint beside earlier ones and the champion's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice

from cairn.reports.queries.run_lookup import FoundCheckpoint, configuration_of, tokens_at
from cairn.reports.queries.run_status import stopped_early
from cairn.storage.logs import registry, run_entries, run_log, run_state

VAL_LOSS = "val_loss"
_MOST_EARLIER = 20
Outcome = run_entries.EvaluationRecorded | run_entries.EvaluationFailed


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSummary(run_entries.EvaluationOutcome):
    """The result of one evaluation of exact weights under an exact suite; `status` is recorded or failed."""

    status: str
    metrics: Mapping[str, float]
    samples: tuple[str, ...]
    evaluator_version: str | None
    boundary: str | None
    detail: str | None
    verdict: run_entries.CurveVerdict | None


def list_evaluations(state: run_state.RunState) -> tuple[EvaluationSummary, ...]:
    """Return recorded and failed evaluations in the order in which they started."""
    found: list[Outcome] = [*state.evaluations, *state.failed_evaluations]
    return tuple(sorted(map(summarize_evaluation, found), key=lambda summary: summary.started_at))


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutPoint:
    """Held-out loss of a checkpoint on the surviving line, in nats per token; `tokens` are those trained by then."""

    step: int
    tokens: int
    val_loss: float
    manifest_sha256: str


def list_held_out(state: run_state.RunState) -> tuple[HeldOutPoint, ...]:
    """Return those of the surviving checkpoints in step order, all measured by one suite: the one used most often."""
    kept = {record.committed.manifest_sha256 for record in state.surviving_checkpoints}
    measured = [item for item in state.evaluations if item.manifest_sha256 in kept and VAL_LOSS in item.metrics]
    suites = [item.suite_sha256 for item in measured]
    return tuple(
        HeldOutPoint(
            step=it.step,
            tokens=tokens_at(state, it.step),
            val_loss=it.metrics[VAL_LOSS],
            manifest_sha256=it.manifest_sha256,
        )
        for it in state.surviving_evaluations(max(reversed(suites), key=suites.count, default=""), VAL_LOSS)
    )


def find_best(points: Sequence[HeldOutPoint]) -> HeldOutPoint | None:
    """Return the point with the least loss, the earliest of equals; None before the first finite one."""
    finite = (point for point in points if math.isfinite(point.val_loss))
    return min(finite, key=lambda point: (point.val_loss, point.step), default=None)


def summarize_evaluation(item: Outcome) -> EvaluationSummary:
    """Return one evaluation; a failed one has a detail and no metrics."""
    recorded = item if isinstance(item, run_entries.EvaluationRecorded) else None
    return EvaluationSummary(
        **{field.name: getattr(item, field.name) for field in fields(run_entries.EvaluationOutcome)},
        status="recorded" if recorded else "failed",
        metrics=recorded.metrics if recorded else {},
        samples=recorded.samples if recorded else (),
        evaluator_version=recorded.evaluator_version if recorded else None,
        boundary=recorded.boundary or None if recorded else None,
        detail=item.detail if isinstance(item, run_entries.EvaluationFailed) else None,
        verdict=recorded.verdict if recorded else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedEvaluation:
    """An evaluation of one checkpoint; `role` is this, earlier, or the alias that points at the weights."""

    role: str
    run_id: str
    evaluation: EvaluationSummary


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationComparison:
    """A checkpoint's evaluations, each followed by other weights' under its suite; `status` is failed where any is."""

    run_id: str
    step: int
    manifest_sha256: str
    status: str
    rows: tuple[ComparedEvaluation, ...]


def compare_evaluations(found: FoundCheckpoint, outcomes: Sequence[Outcome]) -> EvaluationComparison:
    """Return the outcomes with the run's other evaluations, newest first, and the champion's, suite by suite."""
    from cairn.tasks.evaluator.evaluation_run import find_evaluation  # only where evaluations are compared

    log, state, rows = found.log, found.log.refresh(), list[ComparedEvaluation]()
    alias = configuration_of(state).promotion.alias
    champion = registry.Registry(log.store, alias).refresh().champion
    for outcome in outcomes:
        rows.append(_row("this", log.run_id, outcome))
        best = None
        if champion is not None:
            champion_log = log if champion.run_id == log.run_id else run_log.RunLog(log.store, champion.run_id)
            best = find_evaluation(champion_log.refresh(), champion.manifest_sha256, outcome.suite_sha256)
            if best is not None and best != outcome:
                rows.append(_row(alias, champion.run_id, best))
        same_suite = (item for item in reversed(state.evaluations) if item.suite_sha256 == outcome.suite_sha256)
        earlier = (item for item in same_suite if item not in (outcome, best))
        rows += [_row("earlier", log.run_id, item) for item in islice(earlier, _MOST_EARLIER)]
    status = "failed" if any(isinstance(item, run_entries.EvaluationFailed) for item in outcomes) else "recorded"
    step, digest = found.reference.step, found.reference.manifest_sha256
    return EvaluationComparison(run_id=log.run_id, step=step, manifest_sha256=digest, status=status, rows=tuple(rows))


def _row(role: str, run_id: str, item: Outcome) -> ComparedEvaluation:
    return ComparedEvaluation(role=role, run_id=run_id, evaluation=summarize_evaluation(item))


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The verdict on the recorded steps up to `step`; the evaluations of the curve's suite have those before it."""

    run_id: str
    step: int
    total_steps: int
    verdict: run_entries.CurveVerdict
    stopped_early: str | None
    evaluations: tuple[EvaluationSummary, ...]


def diagnose_run(log: run_log.RunLog) -> Diagnosis:
    """Return the diagnosis of a run that was read; raises `StorageError` where its step records cannot be read."""
    from cairn.tasks.evaluator.curve_reader import CurveReader, curve_suite  # only where a curve is judged
    from cairn.tasks.policy.curve_verdict import judge

    suite_sha256 = curve_suite(log.state)
    curve = CurveReader(log.store, log.prefix).read(log.state, suite_sha256=suite_sha256)
    measured = log.state.surviving_evaluations(suite_sha256, VAL_LOSS)
    return Diagnosis(
        run_id=log.run_id,
        step=curve.steps[-1] if curve.steps else 0,
        total_steps=curve.total_steps,
        verdict=judge(curve),
        stopped_early=stopped_early(log.state),
        evaluations=tuple(map(summarize_evaluation, measured)),
    )
