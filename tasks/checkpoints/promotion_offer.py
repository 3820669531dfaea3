"""Offers of a checkpoint to an alias: pin it, let the gates decide on the newest registry, record the decision.

The run's log pins the checkpoint before the registry may point at it, so that no sweep deletes it in between. The gates
are asked again at every append: of two concurrent offers the slower one is compared with the new champion.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from cairn.storage.checkpoints.resume_point import new_pin, pin_checkpoint, unpin_checkpoint
from cairn.storage.logs import log_entry, run_entries, run_log, run_state
from cairn.storage.logs.registry import Promoted, Refused, Registry, RegistryState
from cairn.tasks.checkpoints import metric_comparison, promotion
from cairn.tasks.checkpoints.promotion import Candidate, PromotionRules
from cairn.tasks.configuration.stored_configuration import parse_stored_configuration
from cairn.tasks.errors import GateRefused
from cairn.tasks.machine.placement import this_placement
from cairn.tasks.policy import run_set


def offer(log: run_log.RunLog, registry: Registry, candidate: Candidate, rules: PromotionRules) -> RegistryState:
    """Append the gates' decision and return the registry; raises `GateRefused` after recording a refusal."""
    state, reference = registry.refresh(), candidate.reference
    if state.champion is not None and state.champion.manifest_sha256 == reference.manifest_sha256:
        return state
    pin = new_pin(reference, this_placement(device="cpu", threads=1), alias=registry.alias)
    candidate = replace(candidate, pin_id=pin.pin_id)
    decide = partial(_decide, log, registry.alias, candidate, rules)
    is_pinned = pin_checkpoint(log, pin, writer=log_entry.this_writer())
    state = registry.append(decide if is_pinned else lambda _: promotion.refuse_unreadable(candidate, registry.alias))
    if any(promoted.pin_id == pin.pin_id for _, promoted in reversed(state.champions)):
        return state
    unpin_checkpoint(log, pin, "the registry did not take it", writer=log_entry.this_writer())
    refusals = (item.refused for item in reversed(state.history) if item.refused is not None)
    if own := next((refused for refused in refusals if refused.pin_id == pin.pin_id), None):
        raise GateRefused(f"gate {own.gate!r} refused step {reference.step}: {own.detail}")
    return state


def preview_offer(
    log: run_log.RunLog, registry: Registry, candidate: Candidate, rules: PromotionRules
) -> Promoted | Refused | None:
    """Return the decision that an offer would record now; None if the alias already points at the checkpoint."""
    record = log.refresh().find_live(candidate.reference.prefix)
    if record is None or record not in log.state.readable:
        return promotion.refuse_unreadable(candidate, registry.alias)
    return _decide(log, registry.alias, candidate, rules, registry.refresh())


def pending_offer(state: run_state.RunState, read_registry: Callable[[str], RegistryState]) -> str:
    """Return the alias that a finished run's best checkpoint was never offered to, or "" if no offer is missing.

    A flow that was killed between `run-finished` and its offer leaves no decision in the registry. A run that needs an
    approval may wait for it, and a run without a successful evaluation has nothing to offer.
    """
    is_finished = state.finished is not None and state.finished.rule != run_set.RULE  # which drops it for a better one
    if state.opened is None or not is_finished or not state.attempts:
        return ""
    rules = parse_stored_configuration(state.attempts[-1].started.config).promotion
    if rules.require_approval or (state.failed_evaluations and not state.evaluations):
        return ""
    offers = (item.promoted or item.refused for item in reversed(read_registry(rules.alias).history))
    return "" if any(body.run_id == state.opened.run_id for body in offers if body is not None) else rules.alias


def _decide(
    log: run_log.RunLog, alias: str, candidate: Candidate, rules: PromotionRules, state: RegistryState
) -> Promoted | Refused | None:
    if candidate.pin_id is not None and candidate.pin_id in state.decided_pins:
        return None  # a sweep took this process for dead and decided: its pin may be over, so it comes too late

    def read(champion: Promoted) -> Sequence[run_entries.EvaluationRecorded]:
        return promotion.evaluations_of(run_log.RunLog(log.store, champion.run_id).refresh(), champion.manifest_sha256)

    read_losses = metric_comparison.losses_reader(log.store)
    return promotion.decide_promotion(
        state, candidate, rules, alias=alias, read_evaluations=read, read_losses=read_losses
    )
