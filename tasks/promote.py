"""The task `promote`: offer a checkpoint to an alias, and put the decision on record."""

from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.registry import Registry, RegistryState
from tasks.errors import GateRefused
from tasks.promotion import Candidate, decide_promotion


@task(name="promote", task_run_name="promote step {step} to {alias}", cache_policy=NO_CACHE, persist_result=False)
def promote(
    registry: Registry, candidate: Candidate, *, alias: str, step: int, min_improvement: float
) -> RegistryState:
    """Append the decision of the gates; raises `GateRefused` (after recording it) when one said no."""
    return offer(registry, candidate, min_improvement=min_improvement)


def offer(registry: Registry, candidate: Candidate, *, min_improvement: float) -> RegistryState:
    """Do what the task does, without the orchestrator."""
    before = len(registry.refresh().refusals)
    state = registry.append(
        partial(decide_promotion, candidate=candidate, alias=registry.alias, min_improvement=min_improvement)
    )
    manifest = candidate.reference.manifest_sha256
    own = [refused for _, refused in state.refusals[before:] if refused.manifest_sha256 == manifest]
    if own and not _is_champion(state, candidate):
        raise GateRefused(f"gate {own[-1].gate!r} refused step {candidate.reference.step}: {own[-1].detail}")
    return state


def _is_champion(state: RegistryState, candidate: Candidate) -> bool:
    champion = state.champion
    return champion is not None and champion.manifest_sha256 == candidate.reference.manifest_sha256
