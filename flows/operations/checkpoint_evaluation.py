"""The evaluation plan of a run, and evaluations of one committed checkpoint on its own, without an orchestrator."""

import os
from dataclasses import replace
from pathlib import Path

from cairn.reports.queries.evaluations import Outcome
from cairn.reports.queries.run_lookup import FoundCheckpoint, configuration_of
from cairn.tasks.configuration.addresses import SUITES, named_file
from cairn.tasks.configuration.configuration_source import read_suite
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import InvalidConfiguration, TaskError
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan, record_evaluation
from cairn.tasks.evaluator.evaluation_suite import command_suites_of, suite_of
from cairn.tasks.machine.placement import settled_threads, work_folder


def plan_checkpoint(found: FoundCheckpoint, suite: str) -> EvaluationPlan:
    """Return the plan: the run's suites, or those of a file; raises `InvalidConfiguration` for an invalid file."""
    config = configuration_of(found.log.state)
    if suite:
        try:
            evaluation = read_suite(named_file(suite, SUITES, folder=Path()), config.evaluation)
        except TaskError as error:
            raise InvalidConfiguration(str(error)) from error
        config = config.model_copy(update={"evaluation": evaluation})
    threads = settled_threads(config.training.threads)
    return plan_evaluation(config, found.opened.data_snapshot, work_folder(os.environ), threads=threads)


def measure(found: FoundCheckpoint, *, suite: str, again: bool) -> tuple[Outcome, ...]:
    """Evaluate under the run's suites, or those of a suite file, in turn; what is on record only if `again`."""
    plan = plan_checkpoint(found, suite)
    return tuple(record_evaluation(found.log, found.reference, one, again=again) for one in plan.all)


def plan_evaluation(
    config: RunConfig, snapshot_id: str, work_dir: Path, *, threads: int, faults: str = ""
) -> EvaluationPlan:
    """Return the plan of the held-out suite, followed by those of the user's evaluators; files go to `work_dir`."""
    plan = EvaluationPlan(
        suite=suite_of(config.evaluation),
        model=config.model,
        snapshot_id=snapshot_id,
        cache_dir=work_dir / "snapshots",
        device=config.training.device,
        threads=threads,
        timeout_seconds=config.evaluation.timeout_seconds,
        budget=config.budgets.evaluator_failed,
        faults=faults,
        mask_documents=config.training.mask_documents,
    )
    following = tuple(
        replace(plan, suite=suite, timeout_seconds=suite.timeout_seconds)
        for suite in command_suites_of(config.evaluation)
    )
    return replace(plan, following=following)
