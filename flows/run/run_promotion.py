"""The end of a run: its best checkpoint is evaluated and offered to the alias once, with approval where required."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from prefect.client.schemas.objects import State

from flows.operations.checkpoint_offer import (
    best_candidate,
    describe_earlier_decision,
    describe_training,
    last_checkpoint,
    missing_suites,
    promotion_rules,
)
from flows.orchestrator.promotion_approval import Question, Waiting, ask
from flows.run.active_run import ActiveRun
from storage.logs.log_entry import CheckpointReference
from storage.logs.registry import Promoted, Registry
from tasks.checkpoints.promotion import Approval, Candidate, PromotionRules, decision_on_record
from tasks.checkpoints.promotion_offer import preview_offer
from tasks.errors import CheckpointGone, EvaluationInterrupted
from tasks.evaluate import evaluate, task_name
from tasks.evaluator.evaluation_run import EvaluationPlan
from tasks.promote import promote


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferEnd:
    """What came of an offer, for people; `is_interrupted`: a shutdown was requested before it was decided."""

    message: str
    is_interrupted: bool = False


def offer_best(run: ActiveRun) -> OfferEnd:
    """Evaluate the last and the best checkpoint, and offer the best one unless that was decided before."""
    rules = promotion_rules(run.config)
    try:
        _evaluate_candidates(run, rules)
    except EvaluationInterrupted as interrupted:
        return OfferEnd(message=f"trained; {interrupted}; the same command continues", is_interrupted=True)
    state = run.log.refresh()
    how = describe_training(state)
    candidate = best_candidate(run.log.run_id, state, rules)
    if candidate is None:
        return OfferEnd(message=f"{how}; nothing to promote: no evaluation succeeded")
    registry = Registry(run.log.store, run.config.promotion.alias)
    foreseen = preview_offer(run.log, registry, candidate, replace(rules, needs_approval=False))
    if before := describe_earlier_decision(registry, candidate, foreseen):
        return OfferEnd(message=f"{how}; {before}")
    if rules.needs_approval and isinstance(foreseen, Promoted):
        answer = _ask(run, registry, foreseen)
        if isinstance(answer, str):
            left = _describe_open_question(registry, candidate, answer)
            return OfferEnd(message=f"{how}; {left}", is_interrupted=run.shutdown.signal is not None)
        candidate = replace(candidate, approval=answer)
    return OfferEnd(message=f"{how}; {_offer(run, registry, candidate, rules)}")


def _evaluate_candidates(run: ActiveRun, rules: PromotionRules) -> None:
    """Evaluate the last checkpoint under every suite, then the best one under the suites that promotion requires."""
    last = last_checkpoint(run.log.refresh())
    if last is not None:
        _evaluate_missing(run, last.committed.reference, run.evaluation.all)
    best = best_candidate(run.log.run_id, run.log.refresh(), rules)
    if best is not None and (last is None or best.reference != last.committed.reference):
        required = {suite.sha256 for suite in rules.required}
        with suppress(CheckpointGone):  # then another one is the best
            _evaluate_missing(run, best.reference, [p for p in run.evaluation.all if p.suite.sha256 in required])


def _evaluate_missing(run: ActiveRun, reference: CheckpointReference, plans: Sequence[EvaluationPlan]) -> None:
    missing = missing_suites(run.log.state, reference.manifest_sha256, (plan.suite.sha256 for plan in plans))
    for plan in plans:
        if plan.suite.sha256 in missing:
            named = evaluate.with_options(task_run_name=task_name(reference.step, plan))
            ended = named(run.log, lambda: reference, plan, step=reference.step, stopping=run.is_shutting_down)
            if isinstance(ended, State):
                raise EvaluationInterrupted(ended.message)


def _offer(run: ActiveRun, registry: Registry, candidate: Candidate, rules: PromotionRules) -> str:
    step = candidate.reference.step
    state = promote(run.log, registry, candidate, rules, alias=registry.alias, step=step, return_state=True)
    run.say(f"  {state.message}")
    return str(state.message)


def _ask(run: ActiveRun, registry: Registry, proposal: Promoted) -> Approval | str:
    seconds = run.config.promotion.approval_timeout_seconds
    question = Question(proposal=proposal, champion=registry.state.champion, timeout_seconds=seconds)
    known = decision_on_record(registry.state, proposal.manifest_sha256)

    def is_settled() -> bool:
        return decision_on_record(registry.refresh(), proposal.manifest_sha256) is not known

    show = run.overview.show_question
    waiting = Waiting(shutdown=run.shutdown, is_settled=is_settled, say=run.say, show=show)
    answer = ask(question, run.flow_run_id, waiting)
    show("")
    return answer


def _describe_open_question(registry: Registry, candidate: Candidate, why: str) -> str:
    if before := describe_earlier_decision(registry, candidate, None):
        return before
    named = f"{candidate.run_id}@{candidate.reference.step}"
    return (
        f"{registry.alias} is not changed, {named} waits for approval ({why}); "
        f"`cairn promote {named}`, typed by a person, approves it, the same command asks again"
    )
