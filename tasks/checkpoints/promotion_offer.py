"""Offering a checkpoint to an alias: held first, then the gates decide on the newest registry, and it is recorded.

Owns the order of the two logs: the run's log holds the checkpoint before the registry may point at it, so that no
sweep can come between. What the gates need of the champion's own run is looked up each time they are asked: of two
offers at once the slower one is judged against the new champion. Refuses to know the orchestrator: a person offers
without one.
"""

from dataclasses import replace
from functools import partial

from storage.checkpoints.checkpoint_pin import new_pin, pin_checkpoint, unpin_checkpoint
from storage.logs.entry_log import this_writer
from storage.logs.registry import Registry, RegistryState
from storage.logs.registry_entries import Promoted, Refused
from storage.logs.run_entries import CheckpointPinned, EvaluationRecorded
from storage.logs.run_log import RunLog
from storage.stores.object_store import ObjectStore
from tasks.errors import GateRefused
from tasks.machine.placement import this_placement
from tasks.policy.promotion import (
    Candidate,
    PromotionRules,
    compared_evaluation,
    decide_promotion,
    evaluations_of,
    is_measured_like,
    refuse_unreadable,
)


def offer(log: RunLog, registry: Registry, candidate: Candidate, rules: PromotionRules) -> RegistryState:
    """Append what the gates decide and return the registry; raises `GateRefused`, recorded first, when one said no."""
    state = registry.refresh()
    if _is_champion(state, candidate):
        return state
    hold = new_pin(candidate.reference, this_placement(device="cpu", threads=1), alias=registry.alias)
    candidate = replace(candidate, hold_id=hold.hold_id)
    if not pin_checkpoint(log, hold, writer=this_writer()):
        state = registry.append(lambda _: refuse_unreadable(candidate, registry.alias))
    else:
        state = registry.append(partial(_decide, log.store, registry.alias, candidate, rules))
    return _settle(log, state, candidate, hold)


def foresee(log: RunLog, registry: Registry, candidate: Candidate, rules: PromotionRules) -> Promoted | Refused | None:
    """Return what an offer would put on record now, without offering: None where the alias points at it already."""
    record = log.refresh().find(candidate.reference.prefix)
    if record is None or record not in log.state.readable:
        return refuse_unreadable(candidate, registry.alias)
    return _decide(log.store, registry.alias, candidate, rules, registry.refresh())


def _decide(
    store: ObjectStore, alias: str, candidate: Candidate, rules: PromotionRules, state: RegistryState
) -> Promoted | Refused | None:
    evaluation = compared_evaluation(candidate, rules, state.champion)
    return decide_promotion(
        state,
        candidate,
        rules,
        alias=alias,
        champion_evaluation=_measured_alike(store, state.champion, evaluation),
    )


def _measured_alike(
    store: ObjectStore, champion: Promoted | None, evaluation: EvaluationRecorded | None
) -> EvaluationRecorded | None:
    """Return the evaluation of the champion's weights under the candidate's suite and data, if it is on record."""
    if champion is None or evaluation is None or is_measured_like(evaluation, champion):
        return None
    known = evaluations_of(RunLog(store, champion.run_id).refresh(), champion.manifest_sha256)
    wanted = (evaluation.suite_sha256, evaluation.data_snapshot)
    return next((item for item in known if (item.suite_sha256, item.data_snapshot) == wanted), None)


def _settle(log: RunLog, state: RegistryState, candidate: Candidate, hold: CheckpointPinned) -> RegistryState:
    if any(promoted.hold_id == hold.hold_id for _, promoted in state.champions):
        return state
    unpin_checkpoint(log, hold, "the registry did not take it", writer=this_writer())
    own = [refused for _, refused in state.refusals if refused.hold_id == hold.hold_id]
    if own:
        raise GateRefused(f"gate {own[-1].gate!r} refused step {candidate.reference.step}: {own[-1].detail}")
    return state


def _is_champion(state: RegistryState, candidate: Candidate) -> bool:
    champion = state.champion
    return champion is not None and champion.manifest_sha256 == candidate.reference.manifest_sha256
