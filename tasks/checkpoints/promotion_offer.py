"""Offering a checkpoint to an alias: pin it, let the gates decide on the newest registry, record the decision.

The run's log pins the checkpoint before the registry may point at it, so that no sweep deletes it in between. The gates
are asked again at every append: of two concurrent offers the slower one is compared with the new champion.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from storage.checkpoints.checkpoint_pin import new_pin, pin_checkpoint, unpin_checkpoint
from storage.logs.entry_log import this_writer
from storage.logs.registry import Promoted, Refused, Registry, RegistryState
from storage.logs.run_entries import CheckpointPinned, EvaluationRecorded
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from storage.stores.object_store import ObjectStore
from tasks.configuration.evaluation_settings import PromotionConfig
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
    """Append the gates' decision and return the registry; raises `GateRefused` after recording a refusal."""
    state = registry.refresh()
    if _is_champion(state, candidate):
        return state
    pin = new_pin(candidate.reference, this_placement(device="cpu", threads=1), alias=registry.alias)
    candidate = replace(candidate, hold_id=pin.hold_id)
    if not pin_checkpoint(log, pin, writer=this_writer()):
        state = registry.append(lambda _: refuse_unreadable(candidate, registry.alias))
    else:
        state = registry.append(partial(_decide, log.store, registry.alias, candidate, rules))
    return _settle(log, state, candidate, pin)


def preview_offer(
    log: RunLog, registry: Registry, candidate: Candidate, rules: PromotionRules
) -> Promoted | Refused | None:
    """Return the decision that an offer would record now; None if the alias already points at the checkpoint."""
    record = log.refresh().find(candidate.reference.prefix)
    if record is None or record not in log.state.readable:
        return refuse_unreadable(candidate, registry.alias)
    return _decide(log.store, registry.alias, candidate, rules, registry.refresh())


def pending_offer(state: RunState, read_registry: Callable[[str], RegistryState]) -> str:
    """Return the alias that a finished run's best checkpoint was never offered to, or "" if no offer is missing.

    A flow that was killed between `run-finished` and its offer leaves no decision in the registry. A run that needs an
    approval may wait for it, and a run without a successful evaluation has nothing to offer.
    """
    if state.opened is None or state.finished is None or not state.attempts:
        return ""
    section = state.attempts[-1].started.config.get("promotion", {})
    if section.get("require_approval") or (state.failed_evaluations and not state.evaluations):
        return ""
    alias = str(section.get("alias", PromotionConfig().alias))
    offered = {body.run_id for _, body in read_registry(alias).history if isinstance(body, Promoted | Refused)}
    return "" if state.opened.run_id in offered else alias


def _decide(
    store: ObjectStore, alias: str, candidate: Candidate, rules: PromotionRules, state: RegistryState
) -> Promoted | Refused | None:
    evaluation = compared_evaluation(candidate, rules, state.champion)
    return decide_promotion(
        state,
        candidate,
        rules,
        alias=alias,
        champion_evaluation=_comparable_evaluation(store, state.champion, evaluation),
    )


def _comparable_evaluation(
    store: ObjectStore, champion: Promoted | None, evaluation: EvaluationRecorded | None
) -> EvaluationRecorded | None:
    """Return the evaluation of the champion's weights under the candidate's suite and data, if there is one."""
    if champion is None or evaluation is None or is_measured_like(evaluation, champion):
        return None
    known = evaluations_of(RunLog(store, champion.run_id).refresh(), champion.manifest_sha256)
    wanted = (evaluation.suite_sha256, evaluation.data_snapshot)
    return next((item for item in known if (item.suite_sha256, item.data_snapshot) == wanted), None)


def _settle(log: RunLog, state: RegistryState, candidate: Candidate, pin: CheckpointPinned) -> RegistryState:
    if any(promoted.hold_id == pin.hold_id for _, promoted in state.champions):
        return state
    unpin_checkpoint(log, pin, "the registry did not take it", writer=this_writer())
    own = [refused for _, refused in state.refusals if refused.hold_id == pin.hold_id]
    if own:
        raise GateRefused(f"gate {own[-1].gate!r} refused step {candidate.reference.step}: {own[-1].detail}")
    return state


def _is_champion(state: RegistryState, candidate: Candidate) -> bool:
    champion = state.champion
    return champion is not None and champion.manifest_sha256 == candidate.reference.manifest_sha256
