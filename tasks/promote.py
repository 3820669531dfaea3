"""The step `promote`: offers a checkpoint to an alias and records the decision."""

from dataclasses import dataclass

from prefect import task

from cairn.storage.logs.registry import Registry
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.checkpoints import promotion
from cairn.tasks.errors import GateRefused


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A checkpoint that is offered to an alias under the rules of its run."""

    candidate: promotion.Candidate
    rules: promotion.PromotionRules
    registry: Registry

    def __str__(self) -> str:
        return f"step {self.candidate.reference.step} to {self.registry.alias}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferDecision:
    """The decision of the gates, in a sentence."""

    message: str
    is_refused: bool = False


@task(name="promote", task_run_name="promote {offered}", persist_result=False)
def promote(offered: Offer, log: RunLog) -> OfferDecision:
    """Append the decision of the gates; a refusal is a decision too."""
    try:
        champion = promotion.offer(log, offered.registry, offered.candidate, offered.rules).champion
    except GateRefused as refused:
        return OfferDecision(message=f"not promoted: {refused}", is_refused=True)
    assert champion is not None
    return OfferDecision(message=promotion.describe_champion(champion))
