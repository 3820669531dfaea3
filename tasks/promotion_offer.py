"""Offering a checkpoint to an alias: held first, then the gates decide on the newest registry, and it is recorded.

Owns the order of the two logs: the run's log holds the checkpoint before the registry may point at it, so that no
sweep can come between. Refuses to know the orchestrator: a person offers without one.
"""

from dataclasses import replace
from functools import partial

from storage.checkpoint_hold import hold_checkpoint, new_hold, release_checkpoint
from storage.entry_log import this_writer
from storage.registry import Registry, RegistryState
from storage.run_entries import CheckpointHeld
from storage.run_log import RunLog
from tasks.errors import GateRefused
from tasks.promotion import Candidate, decide_promotion, refuse_unreadable
from tasks.this_machine import this_placement


def offer(log: RunLog, registry: Registry, candidate: Candidate, *, min_improvement: float) -> RegistryState:
    """Append what the gates decide and return the registry; raises `GateRefused`, recorded first, when one said no."""
    state = registry.refresh()
    if _is_champion(state, candidate):
        return state
    hold = new_hold(candidate.reference, this_placement(device="cpu", threads=1), alias=registry.alias)
    candidate = replace(candidate, hold_id=hold.hold_id)
    if not hold_checkpoint(log, hold, writer=this_writer()):
        state = registry.append(lambda _: refuse_unreadable(candidate, registry.alias))
    else:
        state = registry.append(
            partial(decide_promotion, candidate=candidate, alias=registry.alias, min_improvement=min_improvement)
        )
    return _settle(log, state, candidate, hold)


def _settle(log: RunLog, state: RegistryState, candidate: Candidate, hold: CheckpointHeld) -> RegistryState:
    if any(promoted.hold_id == hold.hold_id for _, promoted in state.champions):
        return state
    release_checkpoint(log, hold, "the registry did not take it", writer=this_writer())
    own = [refused for _, refused in state.refusals if refused.hold_id == hold.hold_id]
    if own:
        raise GateRefused(f"gate {own[-1].gate!r} refused step {candidate.reference.step}: {own[-1].detail}")
    return state


def _is_champion(state: RegistryState, candidate: Candidate) -> bool:
    champion = state.champion
    return champion is not None and champion.manifest_sha256 == candidate.reference.manifest_sha256
