"""The task `promote`: offers a checkpoint to an alias and records the decision."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.logs.registry import Registry, RegistryState
from storage.logs.run_log import RunLog
from tasks.checkpoints.promotion import Candidate, PromotionRules
from tasks.checkpoints.promotion_offer import offer


@task(name="promote", task_run_name="promote step {step} to {alias}", cache_policy=NO_CACHE, persist_result=False)
def promote(
    log: RunLog, registry: Registry, candidate: Candidate, rules: PromotionRules, *, alias: str, step: int
) -> RegistryState:
    """Append the decision of the gates; raises `GateRefused`, after recording it, if a gate refused."""
    return offer(log, registry, candidate, rules)
