"""Offering a checkpoint to an alias: the gates decide on the newest registry, the decision is recorded.

Owns the append and the refusal's exception. Refuses to know the orchestrator: a person offers without one.
"""

from functools import partial

from storage.registry import Registry, RegistryState
from tasks.errors import GateRefused
from tasks.promotion import Candidate, decide_promotion


def offer(registry: Registry, candidate: Candidate, *, min_improvement: float) -> RegistryState:
    """Append what the gates decide and return the registry; raises `GateRefused`, recorded first, when one said no."""
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
