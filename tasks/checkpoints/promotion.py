"""Offers of a checkpoint to an alias: pin it, let the gates decide on the newest registry, record the decision.

The run's log pins the checkpoint before the registry may point at it, so that no sweep deletes it in between. The gates
are pure functions, and the first one that refuses is recorded. They are asked again at every append: of two concurrent
offers the slower one is compared with the new champion.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeAlias

from cairn.storage.checkpoints.resume_point import new_pin, pin_checkpoint, unpin_checkpoint
from cairn.storage.logs import log_entry, run_entries, run_log, run_state
from cairn.storage.logs.registry import Promoted, Refused, Registry, RegistryState, SuiteReference
from cairn.tasks.configuration.settings import METRIC
from cairn.tasks.configuration.stored_configuration import parse_stored_configuration
from cairn.tasks.errors import GateRefused
from cairn.tasks.machine.placement import this_placement

_Measured: TypeAlias = Promoted | run_entries.EvaluationRecorded


class Gate(StrEnum):
    """The gates in the order in which they are asked, by their stored words."""

    READABLE = "readable"
    EVALUATED = "evaluated"
    FINITE = "finite"
    VERDICT = "verdict"
    COMPARABLE = "comparable"
    BETTER = "better"
    APPROVED = "approved"
    ABANDONED = "abandoned"
    """Set by the sweep for the offer of a dead process; no gate has judged those weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Approval:
    """A person's answer to a promotion that passes every other gate."""

    is_given: bool
    by: str
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A checkpoint offered to an alias by a person or flow; `evaluations` are of these very weights, newest first."""

    run_id: str
    reference: log_entry.CheckpointReference
    evaluations: tuple[run_entries.EvaluationRecorded, ...]
    by: str
    why: str = ""
    approval: Approval | None = None
    pin_id: str | None = None

    @property
    def named(self) -> str:
        """The checkpoint as a command names it."""
        return f"{self.run_id}@{self.reference.step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotionRules:
    """The requirements of the gates.

    Weights are evaluated under every suite of `required` and compared under the first; none accepts any evaluation.
    """

    required: tuple[SuiteReference, ...] = ()
    min_improvement: float = 0.0
    refuse_verdicts: tuple[str, ...] = ()
    needs_approval: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offer:
    """Input of a gate; `champion_loss` is None if there is no champion or it is not comparable."""

    candidate: Candidate
    rules: PromotionRules
    champion: Promoted | None
    evaluation: run_entries.EvaluationRecorded | None
    champion_loss: float | None


def evaluations_of(state: run_state.RunState, manifest_sha256: str) -> tuple[run_entries.EvaluationRecorded, ...]:
    """Return every evaluation of exactly these weights, newest first."""
    return tuple(reversed(state.evaluations_of(manifest_sha256)))


def find_best_evaluation(state: run_state.RunState, suite_sha256: str) -> run_entries.EvaluationRecorded | None:
    """Return the evaluation with the lowest finite loss among readable checkpoints of the suite."""
    known = (item for record in state.readable for item in reversed(record.evaluations))
    fitting = (item for item in known if item.suite_sha256 == suite_sha256)
    finite = (item for item in fitting if math.isfinite(item.metrics.get(METRIC, math.nan)))
    return min(finite, key=lambda item: item.metrics[METRIC], default=None)


def choose_evaluation(
    candidate: Candidate, rules: PromotionRules, champion: Promoted | None
) -> run_entries.EvaluationRecorded | None:
    """Return the evaluation to compare: one measured like the champion, else the primary suite's, else None."""
    suites = [suite.sha256 for suite in rules.required[:1]] or [item.suite_sha256 for item in candidate.evaluations[:1]]
    suites += [champion.suite_sha256] if champion else []
    found = [item for suite in suites for item in candidate.evaluations if item.suite_sha256 == suite]
    alike = [item for item in found if champion is None or is_measured_like(item, champion)]
    return next(iter([*alike, *found]), None)


def is_measured_like(evaluation: run_entries.EvaluationRecorded, other: _Measured) -> bool:
    """Whether two losses are comparable: the same suite on the same data."""
    return (evaluation.suite_sha256, evaluation.data_snapshot) == (other.suite_sha256, other.data_snapshot)


def decide_promotion(
    registry: RegistryState,
    candidate: Candidate,
    rules: PromotionRules,
    *,
    alias: str,
    read_evaluations: Callable[[Promoted], Sequence[run_entries.EvaluationRecorded]],
) -> Promoted | Refused | None:
    """Return the entry to append, or None if the alias already points at these weights.

    `read_evaluations` returns the champion's; called if its promotion was measured on another suite or data.
    """
    champion = registry.champion
    if champion is not None and champion.manifest_sha256 == candidate.reference.manifest_sha256:
        return None
    evaluation, loss = choose_evaluation(candidate, rules, champion), None
    if champion is not None and evaluation is not None:
        is_alike = is_measured_like(evaluation, champion)
        measured: Sequence[_Measured] = [champion] if is_alike else read_evaluations(champion)
        alike = (item.metrics.get(METRIC, math.inf) for item in measured if is_measured_like(evaluation, item))
        loss = next(alike, None)
    offer = _Offer(candidate=candidate, rules=rules, champion=champion, evaluation=evaluation, champion_loss=loss)
    for name, gate in GATES:
        if detail := gate(offer):
            return refusal(candidate, alias, name, detail, evaluation)
    return _promoted(offer, alias)


def refuse_unreadable(candidate: Candidate, alias: str) -> Refused:
    """Return the refusal of a checkpoint that is no longer committed, so that nothing protects its bytes."""
    problem = "this checkpoint is no longer committed in the run's log, and its bytes may be deleted"
    advice = f"`cairn checkpoints {candidate.run_id}` lists those that can be promoted"
    return refusal(candidate, alias, Gate.READABLE, f"{problem}; {advice}")


def decision_on_record(state: RegistryState, manifest_sha256: str) -> Promoted | Refused | None:
    """Return the last decision on an offer of these weights, rolled back since or not; None if there is none."""
    for _, body in reversed(state.history):
        if isinstance(body, Refused) and body.gate == Gate.ABANDONED:
            continue
        if isinstance(body, Promoted | Refused) and body.manifest_sha256 == manifest_sha256:
            return body
    return None


def _evaluated(offer: _Offer) -> str:
    named, manifest = offer.candidate.named, offer.candidate.reference.manifest_sha256[:8]
    measured = {item.suite_sha256 for item in offer.candidate.evaluations}
    missing = [suite.name for suite in offer.rules.required[:1] if offer.evaluation is None]
    missing += [suite.name for suite in offer.rules.required[1:] if suite.sha256 not in measured]
    if offer.evaluation is not None and not missing:
        return ""
    which = f"suite {', '.join(missing)}" if missing else "any suite"
    advice = f"`cairn evaluate {named}` measures it, then `cairn promote {named}` offers it again"
    return f"manifest {manifest} has no evaluation on record under {which}; {advice}"


def _finite(offer: _Offer) -> str:
    assert offer.evaluation is not None
    wrong = {METRIC: offer.evaluation.metrics.get(METRIC, math.nan)}
    required = {suite.sha256 for suite in offer.rules.required}
    for item in offer.candidate.evaluations:
        if item is offer.evaluation or item.suite_sha256 in required:
            wrong |= {f"{name} ({item.suite})": value for name, value in item.metrics.items()}
    broken = ", ".join(f"{name} is {value}" for name, value in wrong.items() if not math.isfinite(value))
    advice = "it must be a finite number; offer an earlier step, `cairn evaluations` lists them"
    return f"{broken}: {advice}" if broken else ""


def _verdict(offer: _Offer) -> str:
    verdict = offer.evaluation.verdict if offer.evaluation else None
    if verdict is None or verdict.kind not in offer.rules.refuse_verdicts:
        return ""
    problem = f"the loss curve up to this evaluation is {verdict.kind}, and promotion.refuse_verdicts names it"
    return f"{problem}; `cairn diagnose {offer.candidate.run_id}` explains why and how to fix it"


def _comparable(offer: _Offer) -> str:
    champion, evaluation = offer.champion, offer.evaluation
    if champion is None or evaluation is None or offer.champion_loss is not None:
        return ""
    named = f"the champion {champion.run_id}@{champion.step}"
    if champion.suite_sha256 == evaluation.suite_sha256:
        data = f"other data ({champion.data_snapshot[:8]}, here {evaluation.data_snapshot[:8]})"
        return f"{named} was measured on {data}, so the losses cannot be compared; {_elsewhere(offer.candidate)}"
    suite = f"another suite ({champion.suite_sha256[:8]}, here {evaluation.suite} {evaluation.suite_sha256[:8]})"
    remedy = f"measure it under this one (`cairn evaluate {champion.run_id}@{champion.step} --suite FILE`)"
    return f"{named} was measured under {suite}; {remedy} and offer again, or {_elsewhere(offer.candidate)}"


def _better(offer: _Offer) -> str:
    if offer.champion_loss is None:
        return ""
    assert offer.evaluation is not None
    loss, best, least = offer.evaluation.metrics[METRIC], offer.champion_loss, offer.rules.min_improvement
    if loss < best and loss <= best - least:
        return ""
    margin = f" by {least:g} (promotion.min_improvement)" if least else ""
    return f"{METRIC} {loss:.4f} must be below the champion's {best:.4f}{margin}; {_elsewhere(offer.candidate)}"


def _elsewhere(candidate: Candidate) -> str:
    return f"`cairn promote {candidate.named} --alias NAME` promotes to another alias"


def _approved(offer: _Offer) -> str:
    approval = offer.candidate.approval
    if not offer.rules.needs_approval or (approval is not None and approval.is_given):
        return ""
    named = f"`cairn promote {offer.candidate.named}`"
    if approval is None:
        return f"promotion.require_approval: it is not approved; a person approves it with {named}"
    return f"{approval.by} refused it{f': {approval.why}' if approval.why else ''}; {named} offers it again"


GATES: tuple[tuple[Gate, Callable[[_Offer], str]], ...] = (
    (Gate.EVALUATED, _evaluated),
    (Gate.FINITE, _finite),
    (Gate.VERDICT, _verdict),
    (Gate.COMPARABLE, _comparable),
    (Gate.BETTER, _better),
    (Gate.APPROVED, _approved),
)
"""Each returns the problem and the remedy, or "". `readable` is checked before all of them."""


def _promoted(offer: _Offer, alias: str) -> Promoted:
    candidate, evaluation, approval = offer.candidate, offer.evaluation, offer.candidate.approval
    assert evaluation is not None
    before = "the first one" if offer.champion_loss is None else f"before {offer.champion_loss:.4f}"
    words = [f"{METRIC} {evaluation.metrics[METRIC]:.4f}, {before}", candidate.why, approval.why if approval else ""]
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
        verdict=evaluation.verdict.kind if evaluation.verdict else None,
        by=approval.by if approval else candidate.by,
        why=": ".join(dict.fromkeys(filter(None, words))),
        previous=offer.champion.manifest_sha256 if offer.champion else None,
        pin_id=candidate.pin_id,
    )


def refusal(
    candidate: Candidate, alias: str, gate: Gate, detail: str, evaluation: run_entries.EvaluationRecorded | None = None
) -> Refused:
    """Return the entry of a gate that refuses, with the evaluation that it looked at."""
    finite = {name: value for name, value in evaluation.metrics.items() if math.isfinite(value)} if evaluation else {}
    return Refused(
        alias=alias,
        run_id=candidate.run_id,
        step=candidate.reference.step,
        manifest_sha256=candidate.reference.manifest_sha256,
        gate=gate.value,
        detail=detail,
        by=candidate.approval.by if gate == Gate.APPROVED and candidate.approval else candidate.by,
        why=candidate.why,
        suite_sha256=evaluation.suite_sha256 if evaluation else None,
        metrics=finite,
        pin_id=candidate.pin_id,
    )


def offer(log: run_log.RunLog, registry: Registry, candidate: Candidate, rules: PromotionRules) -> RegistryState:
    """Append the gates' decision and return the registry; raises `GateRefused` after recording a refusal."""
    state, reference = registry.refresh(), candidate.reference
    if state.champion is not None and state.champion.manifest_sha256 == reference.manifest_sha256:
        return state
    pin = new_pin(reference, this_placement(device="cpu", threads=1), alias=registry.alias)
    candidate = replace(candidate, pin_id=pin.pin_id)
    decide = partial(_decide, log, registry.alias, candidate, rules)
    is_pinned = pin_checkpoint(log, pin, writer=log_entry.this_writer())
    state = registry.append(decide if is_pinned else lambda _: refuse_unreadable(candidate, registry.alias))
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
        return refuse_unreadable(candidate, registry.alias)
    return _decide(log, registry.alias, candidate, rules, registry.refresh())


def pending_offer(state: run_state.RunState, read_registry: Callable[[str], RegistryState]) -> str:
    """Return the alias that a finished run's best checkpoint was never offered to, or "" if no offer is missing.

    A flow that was killed between `run-finished` and its offer leaves no decision in the registry. A run that needs an
    approval may wait for it, and a run without a successful evaluation has nothing to offer.
    """
    if state.opened is None or state.finished is None or not state.attempts:
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
        return evaluations_of(run_log.RunLog(log.store, champion.run_id).refresh(), champion.manifest_sha256)

    return decide_promotion(state, candidate, rules, alias=alias, read_evaluations=read)
