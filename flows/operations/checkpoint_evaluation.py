"""The evaluation plan of a run, and evaluations of one committed checkpoint on its own, without an orchestrator."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from cairn.reports.queries import evaluations, run_lookup
from cairn.tasks.configuration import addresses, configuration_source, run_configuration
from cairn.tasks.configuration.network_module import require_allowed
from cairn.tasks.errors import InvalidConfiguration, TaskError
from cairn.tasks.evaluator import evaluation_run
from cairn.tasks.machine.placement import work_folder


def plan_checkpoint(found: run_lookup.FoundCheckpoint, suite: str) -> evaluation_run.EvaluationPlan:
    """Return the plan: the run's suites, or those of a file; raises `InvalidConfiguration` for an invalid file."""
    config = run_lookup.configuration_of(found.log.state)
    allowed = configuration_source.allowed_code(os.environ)
    require_allowed(config.model, allowed)
    config = config.model_copy(update={"code": run_configuration.CodeConfig(allow=allowed)})
    if suite:
        try:
            path = addresses.find_file(suite, addresses.SUITES, folder=Path())
            evaluation = configuration_source.read_suite(path, config.evaluation)
        except TaskError as error:
            raise InvalidConfiguration(str(error)) from error
        config = config.model_copy(update={"evaluation": evaluation})
    return plan_evaluation(config, found.opened.data_snapshot, work_folder(os.environ))


def measure(found: run_lookup.FoundCheckpoint, *, suite: str, again: bool) -> tuple[evaluations.Outcome, ...]:
    """Evaluate under the run's suites, or those of a suite file, in turn; an evaluation on record only if `again`."""
    asked = partial(evaluation_run.Measurement, reference=found.reference, again=again, on_request=True)
    plans = plan_checkpoint(found, suite).all
    return tuple(evaluation_run.record_evaluation(found.log, asked(plan=plan)) for plan in plans)


def plan_evaluation(
    config: run_configuration.RunConfig, snapshot_id: str, work_dir: Path, *, faults: str = ""
) -> evaluation_run.EvaluationPlan:
    """Return the plan of the held-out suite, followed by those of the user's evaluators; files go to `work_dir`."""
    plan = evaluation_run.EvaluationPlan(
        suite=evaluation_run.suite_of(config.evaluation),
        model=config.model,
        snapshot_id=snapshot_id,
        cache_dir=work_dir / "snapshots",
        device=config.training.device,
        threads=config.training.threads,
        timeout_seconds=config.evaluation.timeout_seconds,
        budget=config.budgets.evaluator_failed,
        faults=faults,
        mask_documents=config.training.mask_documents,
        arithmetic=config.training.arithmetic,
        allowed_code=config.code.allow,
    )
    others = config.evaluation.evaluators
    return replace(plan, following=tuple(replace(plan, suite=s, timeout_seconds=s.timeout_seconds) for s in others))
