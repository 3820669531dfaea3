"""The task `promote`: offers a checkpoint to an alias and records the decision."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from cairn.storage.logs.registry import Registry
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.checkpoints.promotion import Candidate, PromotionRules, offer
from cairn.tasks.configuration.settings import METRIC
from cairn.tasks.errors import GateRefused


@task(name="promote", task_run_name="promote step {step} to {alias}", cache_policy=NO_CACHE, persist_result=False)
def promote(
    log: RunLog, registry: Registry, candidate: Candidate, rules: PromotionRules, *, alias: str, step: int
) -> State[Any]:
    """Append the decision of the gates; the state's message is the decision. A refusal completes the task too."""
    try:
        champion = offer(log, registry, candidate, rules).champion
    except GateRefused as refused:
        return Completed(name="Refused", message=f"not promoted: {refused}")
    assert champion is not None
    return Completed(message=f"{alias} is step {champion.step} with held-out loss {champion.metrics[METRIC]:.4f}")
