"""The end of a run: its best checkpoint is offered to the alias, once, with a person's approval where that is required.

Owns that a finished run is not offered twice, and what the flow says of it. Refuses to measure and to decide.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from flows.orchestrator.promotion_approval import Question, Unanswered, Waiting, ask
from storage.logs.registry import Registry
from storage.logs.registry_entries import Promoted, Refused
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from tasks.attempt.shutdown_signal import ShutdownSignal
from tasks.checkpoints.promotion_offer import foresee
from tasks.configuration.settings import PromotionConfig
from tasks.errors import GateRefused
from tasks.policy.promotion import (
    EVALUATED,
    METRIC,
    Approval,
    Candidate,
    PromotionRules,
    best_evaluated,
    decision_on_record,
    evaluations_of,
)
from tasks.promote import promote


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """A run that needs no further attempt, and who offers its best checkpoint."""

    log: RunLog
    promotion: PromotionConfig
    rules: PromotionRules
    flow_run_id: str | None
    notice: ShutdownSignal
    say: Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferEnd:
    """What came of an offer, for people; `is_interrupted`: a notice to leave came while a person was waited for."""

    message: str
    is_interrupted: bool = False


def offer_best(run: FinishedRun) -> OfferEnd:
    """Offer the run's best checkpoint unless that was decided before; returns what came of it."""
    state = run.log.refresh()
    how = _how_it_ended(state)
    candidate = best_candidate(run.log.run_id, state, run.rules)
    if candidate is None:
        return OfferEnd(message=f"{how}; nothing to promote: no evaluation succeeded")
    registry = Registry(run.log.store, run.promotion.alias)
    foreseen = foresee(run.log, registry, candidate, replace(run.rules, needs_approval=False))
    if before := _decided_before(registry, candidate, foreseen):
        return OfferEnd(message=f"{how}; {before}")
    if run.rules.needs_approval and isinstance(foreseen, Promoted):
        answer = _ask(run, registry, foreseen)
        if isinstance(answer, Unanswered):
            left = _left_open(registry, candidate, answer)
            return OfferEnd(message=f"{how}; {left}", is_interrupted=run.notice.signal is not None)
        candidate = replace(candidate, approval=answer)
    return OfferEnd(message=f"{how}; {_offer(run, registry, candidate)}")


def best_candidate(run_id: str, state: RunState, rules: PromotionRules) -> Candidate | None:
    """Return the readable checkpoint with the lowest loss under the primary suite, or None where none was measured."""
    best = best_evaluated(state, rules.required[0].sha256)
    if best is None:
        return None
    reference = next(
        r.committed.reference for r in state.readable if r.committed.manifest_sha256 == best.manifest_sha256
    )
    evaluations = evaluations_of(state, best.manifest_sha256)
    return Candidate(run_id=run_id, reference=reference, evaluations=evaluations, by=f"run {run_id}")


def _offer(run: FinishedRun, registry: Registry, candidate: Candidate) -> str:
    alias, step = registry.alias, candidate.reference.step
    try:
        champion = promote(run.log, registry, candidate, run.rules, alias=alias, step=step).champion
    except GateRefused as refused:
        return f"not promoted: {refused}"
    assert champion is not None
    return f"{alias} is step {champion.step} with held-out loss {champion.metrics[METRIC]:.4f}"


def _decided_before(registry: Registry, candidate: Candidate, foreseen: Promoted | Refused | None) -> str:
    """Return what is on record about offering these weights, or nothing where they are to be offered.

    A missing evaluation may have come since; everything else was said of these very weights, and a person may overrule.
    """
    before, champion = decision_on_record(registry.state, candidate.reference.manifest_sha256), registry.state.champion
    step = candidate.reference.step
    if champion is not None and champion.manifest_sha256 == candidate.reference.manifest_sha256:
        return f"{registry.alias} is step {step} with held-out loss {champion.metrics[METRIC]:.4f}"
    again = f"`cairn promote {candidate.run_id}@{step}` offers it again"
    if isinstance(before, Promoted):
        return f"step {step} has been {registry.alias} before and is not now; {again}"
    if before is None or (before.gate == EVALUATED and not _says_the_same(before, foreseen)):
        return ""
    return f"not promoted: gate {before.gate!r} refused step {step} before: {before.detail}; {again}"


def _says_the_same(before: Refused, foreseen: Promoted | Refused | None) -> bool:
    return isinstance(foreseen, Refused) and (foreseen.gate, foreseen.detail) == (before.gate, before.detail)


def _ask(run: FinishedRun, registry: Registry, proposal: Promoted) -> Approval | Unanswered:
    question = Question(
        proposal=proposal,
        champion=registry.state.champion,
        timeout_seconds=run.promotion.approval_timeout_seconds,
    )
    known = decision_on_record(registry.state, proposal.manifest_sha256)

    def is_settled() -> bool:
        return decision_on_record(registry.refresh(), proposal.manifest_sha256) is not known

    return ask(question, run.flow_run_id, Waiting(notice=run.notice, is_settled=is_settled, say=run.say))


def _left_open(registry: Registry, candidate: Candidate, answer: Unanswered) -> str:
    if before := _decided_before(registry, candidate, None):
        return before
    named = f"{candidate.run_id}@{candidate.reference.step}"
    return (
        f"{registry.alias} is not changed, {named} waits for approval ({answer.why}); "
        f"`cairn promote {named}`, typed by a person, approves it, the same command asks again"
    )


def _how_it_ended(state: RunState) -> str:
    finished = state.finished
    return f"stopped early: {finished.stopped}" if finished is not None and finished.stopped else "trained"
