"""A checkpoint's evaluations beside earlier ones and the champion's, suite by suite."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reports.queries.evaluations import EvaluationSummary, summarize_evaluation
from reports.queries.run_lookup import FoundCheckpoint, configuration_of
from storage.logs.registry import Registry
from storage.logs.run_entries import EvaluationFailed, EvaluationRecorded
from storage.logs.run_log import RunLog
from tasks.evaluator.evaluation_run import find_evaluation

EARLIER_SHOWN = 20
Outcome = EvaluationRecorded | EvaluationFailed


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedEvaluation:
    """An evaluation and whose it is: `role` is this, earlier, or the alias that points at the weights."""

    role: str
    run_id: str
    evaluation: EvaluationSummary


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationComparison:
    """What a checkpoint measured, one row a suite, each followed by other weights under the very same suite.

    `status` is failed where any evaluator failed.
    """

    run_id: str
    step: int
    manifest_sha256: str
    status: str
    rows: tuple[ComparedEvaluation, ...]


def compare_evaluations(found: FoundCheckpoint, outcomes: Sequence[Outcome]) -> EvaluationComparison:
    """Set the outcomes beside the run's other evaluations, newest first, and the champion's, suite by suite."""
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
    champion = Registry(log.store, alias).refresh().champion
    its_log = None if champion is None else log if champion.run_id == log.run_id else RunLog(log.store, champion.run_id)
    its_evaluation = None
    if champion is not None and its_log is not None:
        its_evaluation = find_evaluation(its_log.refresh(), champion.manifest_sha256, suite_sha256)
    if its_evaluation is not None and its_evaluation != outcome and its_log is not None:
        yield _row(alias, its_log.run_id, its_evaluation)
    earlier = [
        item
        for item in reversed(log.state.evaluations)
        if item.suite_sha256 == suite_sha256 and item not in (outcome, its_evaluation)
    ]
    for item in earlier[:EARLIER_SHOWN]:
        yield _row("earlier", log.run_id, item)


def _row(role: str, run_id: str, item: Outcome) -> ComparedEvaluation:
    return ComparedEvaluation(role=role, run_id=run_id, evaluation=summarize_evaluation(item))
