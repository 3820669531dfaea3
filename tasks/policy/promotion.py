"""Promotion: gates in, a decision out. Pure; the registry appends what is decided here.

Owns the gates and their one order: readable, evaluated, finite, verdict, comparable, better, approved. The first that
says no is the one on record. Refuses to look anything up: who offers brings what is on record.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from storage.logs.log_entry import CheckpointReference
from storage.logs.registry import RegistryState
from storage.logs.registry_entries import Promoted, Refused, RolledBack, SuiteReference
from storage.logs.run_entries import EvaluationRecorded
from storage.logs.run_state import RunState

METRIC = "val_loss"
READABLE, EVALUATED, FINITE, VERDICT = "readable", "evaluated", "finite", "verdict"
COMPARABLE, BETTER, APPROVED = "comparable", "better", "approved"
ABANDONED = "abandoned"
"""The sweep's own refusal, of an offer whose holder died: no gate has judged those weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Approval:
    """What a person said about a promotion that every other gate would let through."""

    is_given: bool
    by: str
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A committed checkpoint offered to an alias: its evaluations, who offers it, and what people said about it.

    `evaluations` are of exactly these weights, newest first. `why` is in the words of whoever offers.
    """

    run_id: str
    reference: CheckpointReference
    evaluations: tuple[EvaluationRecorded, ...]
    by: str
    why: str = ""
    approval: Approval | None = None
    hold_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotionRules:
    """What the gates ask for.

    `required` names the suites under which the weights must be measured; under the first one they are compared with
    the champion's. No suite named: any evaluation will do.
    """

    required: tuple[SuiteReference, ...] = ()
    min_improvement: float = 0.0
    refuse_verdicts: tuple[str, ...] = ()
    needs_approval: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offer:
    """What a gate looks at: `evaluation` is compared with `champion_loss`, None where they cannot be."""

    candidate: Candidate
    rules: PromotionRules
    champion: Promoted | None
    evaluation: EvaluationRecorded | None
    champion_loss: float | None


def evaluations_of(state: RunState, manifest_sha256: str) -> tuple[EvaluationRecorded, ...]:
    """Return every evaluation of exactly these weights, newest first."""
    return tuple(item for item in reversed(state.evaluations) if item.manifest_sha256 == manifest_sha256)


def best_evaluated(state: RunState, suite_sha256: str) -> EvaluationRecorded | None:
    """Return the evaluation with the lowest finite loss among readable checkpoints of the suite."""
    readable = {record.committed.manifest_sha256 for record in state.readable}
    fitting = [
        item
        for item in reversed(state.evaluations)
        if item.suite_sha256 == suite_sha256
        and item.manifest_sha256 in readable
        and math.isfinite(item.metrics.get(METRIC, math.nan))
    ]
    return min(fitting, key=lambda item: item.metrics[METRIC], default=None)


def compared_evaluation(
    candidate: Candidate, rules: PromotionRules, champion: Promoted | None
) -> EvaluationRecorded | None:
    """Return the evaluation that is compared with the champion's, or None where there is none to compare.

    Of those under the primary suite and under the suite of the champion's promotion, the one that was measured as the
    champion was; where none was, the primary one.
    """
    suites = [suite.sha256 for suite in rules.required[:1]] or [item.suite_sha256 for item in candidate.evaluations[:1]]
    suites += [champion.suite_sha256] if champion else []
    found = [item for suite in suites for item in candidate.evaluations if item.suite_sha256 == suite]
    alike = (item for item in found if champion is None or is_measured_like(item, champion))
    return next(alike, next(iter(found), None))


def is_measured_like(evaluation: EvaluationRecorded, champion: Promoted) -> bool:
    """Whether two losses may be compared: the same suite on the same data; older promotions do not name their data."""
    same_data = champion.data_snapshot in (None, evaluation.data_snapshot)
    return champion.suite_sha256 == evaluation.suite_sha256 and same_data


def decide_promotion(
    registry: RegistryState,
    candidate: Candidate,
    rules: PromotionRules,
    *,
    alias: str,
    champion_evaluation: EvaluationRecorded | None = None,
) -> Promoted | Refused | None:
    """Return the entry to append, or None where the alias already points at these weights.

    `champion_evaluation` is of the present champion's weights, on record under the suite and the data of the
    candidate's own evaluation: needed only where the champion was promoted under another one.
    """
    champion = registry.champion
    if champion is not None and champion.manifest_sha256 == candidate.reference.manifest_sha256:
        return None
    evaluation = compared_evaluation(candidate, rules, champion)
    offer = _Offer(
        candidate=candidate,
        rules=rules,
        champion=champion,
        evaluation=evaluation,
        champion_loss=_champion_loss(champion, evaluation, champion_evaluation),
    )
    for name, gate in GATES:
        if detail := gate(offer):
            return _refused(candidate, alias, name, detail, evaluation)
    return _promoted(offer, alias)


def refuse_unreadable(candidate: Candidate, alias: str) -> Refused:
    """Return the refusal of a checkpoint that is no longer committed: nothing holds its bytes."""
    detail = (
        "the run's log no longer calls this checkpoint committed: its bytes may be gone; "
        f"`cairn checkpoints {candidate.run_id}` lists those that can be promoted"
    )
    return _refused(candidate, alias, READABLE, detail, None)


def decision_on_record(state: RegistryState, manifest_sha256: str) -> Promoted | Refused | None:
    """Return what was last decided about offering these weights, rolled back since or not; None: never judged."""
    decisions = (
        body
        for _, body in reversed(state.history)
        if not isinstance(body, RolledBack) and body.manifest_sha256 == manifest_sha256
    )
    return next((body for body in decisions if not isinstance(body, Refused) or body.gate != ABANDONED), None)


def _evaluated(offer: _Offer) -> str:
    reference, named = offer.candidate.reference, f"{offer.candidate.run_id}@{offer.candidate.reference.step}"
    advice = f"`cairn evaluate {named}` measures it, then `cairn promote {named}` offers it again"
    measured = {item.suite_sha256 for item in offer.candidate.evaluations}
    missing = [suite.name for suite in offer.rules.required[1:] if suite.sha256 not in measured]
    if offer.evaluation is None:
        missing = [*(suite.name for suite in offer.rules.required[:1]), *missing]
    if offer.evaluation is not None and not missing:
        return ""
    which = f"suite {', '.join(missing)}" if missing else "any suite"
    return f"manifest {reference.manifest_sha256[:8]} has no evaluation on record under {which}; {advice}"


def _finite(offer: _Offer) -> str:
    assert offer.evaluation is not None
    wrong = {METRIC: offer.evaluation.metrics.get(METRIC, math.nan)}
    required = {suite.sha256 for suite in offer.rules.required}
    for item in offer.candidate.evaluations:
        if item is offer.evaluation or item.suite_sha256 in required:
            wrong |= {f"{name} ({item.suite})": value for name, value in item.metrics.items()}
    said = ", ".join(f"{name} is {value}" for name, value in wrong.items() if not math.isfinite(value))
    return f"{said}: it must be a finite number; offer an earlier step, `cairn evaluations` lists them" if said else ""


def _verdict(offer: _Offer) -> str:
    kind = verdict_of(offer.evaluation)
    if kind not in offer.rules.refuse_verdicts:
        return ""
    return (
        f"the loss curve up to this evaluation is {kind}, and promotion.refuse_verdicts names it; "
        f"`cairn diagnose {offer.candidate.run_id}` says why and what cures it"
    )


def _comparable(offer: _Offer) -> str:
    champion, evaluation = offer.champion, offer.evaluation
    if champion is None or evaluation is None or offer.champion_loss is not None:
        return ""
    named = f"the champion {champion.run_id}@{champion.step}"
    if champion.suite_sha256 == evaluation.suite_sha256:
        return (
            f"{named} was measured on other data ({(champion.data_snapshot or '')[:8]}, here "
            f"{evaluation.data_snapshot[:8]}), so the losses say nothing of each other; promote to another alias"
        )
    return (
        f"{named} was measured under another suite ({champion.suite_sha256[:8]}, here {evaluation.suite} "
        f"{evaluation.suite_sha256[:8]}); measure it under this one (`cairn evaluate {champion.run_id}@{champion.step} "
        "--suite FILE`) and offer again, or promote to another alias"
    )


def _better(offer: _Offer) -> str:
    if offer.champion_loss is None:
        return ""
    loss, best, least = _loss(offer), offer.champion_loss, offer.rules.min_improvement
    if loss < best and loss <= best - least:
        return ""
    return (
        f"{METRIC} {loss:.4f} must be below the champion's {best:.4f} by {least:g} (promotion.min_improvement); "
        "the champion stays"
    )


def _approved(offer: _Offer) -> str:
    approval = offer.candidate.approval
    if not offer.rules.needs_approval or (approval is not None and approval.is_given):
        return ""
    named = f"`cairn promote {offer.candidate.run_id}@{offer.candidate.reference.step}`"
    if approval is None:
        return f"promotion.require_approval: nobody has approved it; {named}, typed by a person, is an approval"
    return f"{approval.by} said no{f': {approval.why}' if approval.why else ''}; {named} offers it again"


GATES: tuple[tuple[str, Callable[[_Offer], str]], ...] = (
    (EVALUATED, _evaluated),
    (FINITE, _finite),
    (VERDICT, _verdict),
    (COMPARABLE, _comparable),
    (BETTER, _better),
    (APPROVED, _approved),
)
"""In the order they are asked; each says what is wrong and what to do next, or nothing. `readable` comes before all."""


def verdict_of(evaluation: EvaluationRecorded | None) -> str | None:
    """Return the kind of the verdict on the curve that came with the evaluation, or None where there is none."""
    return evaluation.verdict.kind if evaluation is not None and evaluation.verdict is not None else None


def _champion_loss(
    champion: Promoted | None, evaluation: EvaluationRecorded | None, champion_evaluation: EvaluationRecorded | None
) -> float | None:
    if champion is None or evaluation is None:
        return None
    if is_measured_like(evaluation, champion):
        return champion.metrics.get(METRIC, math.inf)
    return None if champion_evaluation is None else champion_evaluation.metrics.get(METRIC, math.inf)


def _loss(offer: _Offer) -> float:
    assert offer.evaluation is not None
    return offer.evaluation.metrics[METRIC]


def _promoted(offer: _Offer, alias: str) -> Promoted:
    candidate, evaluation, approval = offer.candidate, offer.evaluation, offer.candidate.approval
    assert evaluation is not None
    before = "the first one" if offer.champion_loss is None else f"before {offer.champion_loss:.4f}"
    words = [candidate.why, approval.why if approval else ""]
    return Promoted(
        alias=alias,
        run_id=candidate.run_id,
        step=candidate.reference.step,
        prefix=candidate.reference.prefix,
        manifest_sha256=candidate.reference.manifest_sha256,
        suite_sha256=evaluation.suite_sha256,
        data_snapshot=evaluation.data_snapshot,
        metrics=evaluation.metrics,
        required=offer.rules.required,
        verdict=verdict_of(evaluation),
        by=approval.by if approval else candidate.by,
        why=": ".join([f"{METRIC} {_loss(offer):.4f}, {before}", *dict.fromkeys(word for word in words if word)]),
        previous=offer.champion.manifest_sha256 if offer.champion else None,
        hold_id=candidate.hold_id,
    )


def _refused(
    candidate: Candidate, alias: str, gate: str, detail: str, evaluation: EvaluationRecorded | None
) -> Refused:
    finite = {name: value for name, value in evaluation.metrics.items() if math.isfinite(value)} if evaluation else {}
    return Refused(
        alias=alias,
        run_id=candidate.run_id,
        step=candidate.reference.step,
        manifest_sha256=candidate.reference.manifest_sha256,
        gate=gate,
        detail=detail,
        by=candidate.approval.by if gate == APPROVED and candidate.approval else candidate.by,
        why=candidate.why,
        suite_sha256=evaluation.suite_sha256 if evaluation else None,
        metrics=finite,
        hold_id=candidate.hold_id,
    )
