"""The evaluations of a checkpoint beside the run's earlier ones and the champion's, suite by suite."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reports.queries.evaluations import EvaluationSummary, summarize_evaluation
from reports.queries.run_lookup import FoundCheckpoint, configuration_of
from storage.logs.registry import Registry
from storage.logs.run_entries import EvaluationFailed, EvaluationRecorded
from storage.logs.run_log import RunLog
from tasks.evaluator.evaluation_run import find_evaluation

_MOST_EARLIER = 20
Outcome = EvaluationRecorded | EvaluationFailed


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
    found.log.refresh()
    failed = any(isinstance(item, EvaluationFailed) for item in outcomes)
    return EvaluationComparison(
        run_id=found.log.run_id,
        step=found.reference.step,
        manifest_sha256=found.reference.manifest_sha256,
        status="failed" if failed else "recorded",
        rows=tuple(row for outcome in outcomes for row in _rows(found, outcome)),
    )


def _rows(found: FoundCheckpoint, outcome: Outcome) -> Iterator[ComparedEvaluation]:
    log, suite_sha256 = found.log, outcome.suite_sha256
    yield _row("this", log.run_id, outcome)
    alias = configuration_of(log.state).promotion.alias
    champion, best = Registry(log.store, alias).refresh().champion, None
    if champion is not None:
        champion_log = log if champion.run_id == log.run_id else RunLog(log.store, champion.run_id)
        best = find_evaluation(champion_log.refresh(), champion.manifest_sha256, suite_sha256)
        if best is not None and best != outcome:
            yield _row(alias, champion.run_id, best)
    same_suite = (item for item in reversed(log.state.evaluations) if item.suite_sha256 == suite_sha256)
    earlier = [item for item in same_suite if item not in (outcome, best)]
    for item in earlier[:_MOST_EARLIER]:
        yield _row("earlier", log.run_id, item)


def _row(role: str, run_id: str, item: Outcome) -> ComparedEvaluation:
    return ComparedEvaluation(role=role, run_id=run_id, evaluation=summarize_evaluation(item))
