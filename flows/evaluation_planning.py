"""From a run's configuration to the plan its evaluators follow, beside training or on their own."""

from pathlib import Path

from flows.configuration import RunConfig
from tasks.evaluation_run import EvaluationPlan
from tasks.evaluation_suite import suite_of


def plan_evaluation(
    config: RunConfig, snapshot_id: str, work_dir: Path, *, threads: int, faults: str = ""
) -> EvaluationPlan:
    """Return how the run's checkpoints are measured; downloads are kept under `work_dir`."""
    return EvaluationPlan(
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
