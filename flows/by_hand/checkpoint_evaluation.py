"""Measuring one committed checkpoint on its own, and how it stands beside earlier evaluations: nothing is trained.

Owns which suites it is measured under and which evaluations it is shown with. Refuses to know the orchestrator: a
person measures without one.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.errors import InvalidConfiguration
from flows.views.run_lookup import FoundCheckpoint, configuration_of
from flows.views.run_views import EvaluationView, view_evaluation
from flows.work_folder import work_folder
from storage.logs.registry import Registry
from storage.logs.run_entries import EvaluationFailed, EvaluationRecorded
from storage.logs.run_log import RunLog
from tasks.evaluation.evaluation_run import EvaluationPlan, find_evaluation

EARLIER_SHOWN = 20
Outcome = EvaluationRecorded | EvaluationFailed


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRequest:
    """Under what a checkpoint is measured, empty: its run's suites; `again` measures also what is on record."""

    suite: str = ""
    again: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedEvaluation:
    """An evaluation and whose it is: `role` is this, earlier, or the alias that points at the weights."""

    role: str
    run_id: str
    evaluation: EvaluationView


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonView:
    """What a checkpoint measured, one row a suite, each followed by other weights under the very same suite.

    `status` is failed where any evaluator failed.
    """

    run_id: str
    step: int
    manifest_sha256: str
    status: str
    rows: tuple[ComparedEvaluation, ...]


def plan_checkpoint(found: FoundCheckpoint, request: EvaluationRequest) -> EvaluationPlan:
    """Return how the checkpoint is measured: as its run says, or under a suite file, relative to the working directory.

    Raises `InvalidConfiguration` naming what is wrong with the file.
    """
    from flows.evaluation_planning import plan_evaluation
    from tasks.errors import TaskError
    from tasks.evaluation.suite_file import read_suite
    from tasks.this_machine import usable_cores

    config = configuration_of(found.log.state)
    if request.suite:
        try:
            evaluation = read_suite(Path(request.suite).expanduser(), config.evaluation)
        except TaskError as error:
            raise InvalidConfiguration(str(error)) from error
        config = config.model_copy(update={"evaluation": evaluation})
    threads = config.training.threads or usable_cores()
    return plan_evaluation(config, found.opened.data_snapshot, work_folder(os.environ), threads=threads)


def measure(found: FoundCheckpoint, request: EvaluationRequest) -> tuple[Outcome, ...]:
    """Evaluate under every suite in turn; what is already on record is not measured again unless asked."""
    from tasks.evaluation.evaluation_run import record_evaluation

    plan = plan_checkpoint(found, request)
    return tuple(record_evaluation(found.log, found.reference, one, again=request.again) for one in plan.all)


def compare(found: FoundCheckpoint, outcomes: Sequence[Outcome]) -> ComparisonView:
    """Set the outcomes beside the run's other evaluations, newest first, and the champion's, suite by suite."""
    found.log.refresh()
    failed = any(isinstance(item, EvaluationFailed) for item in outcomes)
    return ComparisonView(
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
    return ComparedEvaluation(role=role, run_id=run_id, evaluation=view_evaluation(item))
