"""Measuring one committed checkpoint on its own, and how it stands beside earlier evaluations: nothing is trained.

Owns which suites it is measured under and which evaluations it is shown with. Refuses to know the orchestrator: a
person measures without one.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from reports.queries.comparison import Outcome
from reports.queries.run_lookup import FoundCheckpoint, configuration_of
from tasks.errors import InvalidConfiguration
from tasks.evaluator.evaluation_run import EvaluationPlan
from tasks.machine.work_folder import work_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRequest:
    """Under what a checkpoint is measured, empty: its run's suites; `again` measures also what is on record."""

    suite: str = ""
    again: bool = False


def plan_checkpoint(found: FoundCheckpoint, request: EvaluationRequest) -> EvaluationPlan:
    """Return how the checkpoint is measured: as its run says, or under a suite file, relative to the working directory.

    Raises `InvalidConfiguration` naming what is wrong with the file.
    """
    from flows.operations.evaluation_planning import plan_evaluation
    from tasks.configuration.suite_file import read_suite
    from tasks.errors import TaskError
    from tasks.machine.placement import usable_cores

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
    from tasks.evaluator.evaluation_run import record_evaluation

    plan = plan_checkpoint(found, request)
    return tuple(record_evaluation(found.log, found.reference, one, again=request.again) for one in plan.all)
