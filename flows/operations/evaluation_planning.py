"""From a run's configuration to the plans its evaluators follow, beside training or on their own."""

from dataclasses import replace
from pathlib import Path

from tasks.configuration.run_configuration import RunConfig
from tasks.evaluator.evaluation_run import EvaluationPlan
from tasks.evaluator.evaluation_suite import command_suites_of, suite_of


def plan_evaluation(
    config: RunConfig, snapshot_id: str, work_dir: Path, *, threads: int, faults: str = ""
) -> EvaluationPlan:
    """Return how the run's checkpoints are measured: under the held-out suite, then under each evaluator of one's own.

    Downloads, and the models that are written for evaluators, are kept under `work_dir`.
    """
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
