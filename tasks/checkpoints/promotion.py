"""The gates before a promotion: pure functions, asked in one order, of which the first that refuses is recorded."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from cairn.storage.logs import log_entry, run_entries, run_state
from cairn.storage.logs.registry import MetricDifference, Promoted, Refused, RegistryState, SuiteReference
from cairn.tasks.checkpoints import metric_comparison
from cairn.tasks.configuration.settings import METRIC, MetricGate


def describe_champion(champion: Promoted) -> str:
    """Return in a sentence which step an alias is, its loss, and how much better it is than the champion before."""
    better = "".join(f", {found} than the champion before" for found in champion.differences[:1])
    loss = champion.metrics[METRIC]
    return f"{champion.alias} is step {champion.step} with held-out loss {loss:.4f}{better}"


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
    `gates` are comparisons with the champion besides that of the held-out loss.
    """

    required: tuple[SuiteReference, ...] = ()
    min_improvement: float = 0.0
    gates: tuple[MetricGate, ...] = ()
    refuse_verdicts: tuple[str, ...] = ()
    needs_approval: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offer:
    """Input of a gate: `evaluation` is compared; `differences` from the champion are in the order of the rules.

    One that cannot be told is the reason in words. There are none before the first champion or without an evaluation.
    """

    candidate: Candidate
    rules: PromotionRules
    champion: Promoted | None
    evaluation: run_entries.EvaluationRecorded | None
    differences: tuple[MetricDifference | str, ...]

    @property
    def known(self) -> tuple[MetricDifference, ...]:
        """The differences that can be told."""
        return tuple(item for item in self.differences if isinstance(item, MetricDifference))


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
    alike = [item for item in found if champion is None or metric_comparison.is_measured_like(item, champion)]
    return next(iter([*alike, *found]), None)


def decide_promotion(
    registry: RegistryState,
    candidate: Candidate,
    rules: PromotionRules,
    *,
    alias: str,
    read_evaluations: Callable[[Promoted], Sequence[run_entries.EvaluationRecorded]],
    read_losses: metric_comparison.ReadLosses,
) -> Promoted | Refused | None:
    """Return the entry to append, or None if the alias already points at these weights.

    `read_evaluations` returns the champion's, newest first; without any, its promotion tells what was measured.
    """
    champion = registry.champion
    if champion is not None and champion.manifest_sha256 == candidate.reference.manifest_sha256:
        return None
    evaluation = choose_evaluation(candidate, rules, champion)
    differences = tuple[MetricDifference | str, ...]()
    if champion is not None and evaluation is not None and METRIC in evaluation.metrics:
        named = f"{champion.run_id}@{champion.step}"
        measured: tuple[metric_comparison.Measured, ...] = (*read_evaluations(champion), champion)
        side = metric_comparison.Side(named=named, run_id=champion.run_id, measured=measured)
        compare = partial(_compare, candidate, rules, evaluation, side, read_losses)
        differences = tuple(map(compare, all_gates(rules)))
    offer = _Offer(candidate=candidate, rules=rules, champion=champion, evaluation=evaluation, differences=differences)
    for name, gate in GATES:
        if detail := gate(offer):
            return refusal(candidate, alias, name, detail, evaluation, offer.known)
    return _promoted(offer, alias)


def all_gates(rules: PromotionRules) -> tuple[MetricGate, ...]:
    """Return the comparisons with the champion, that of the held-out loss first."""
    return (MetricGate(margin=rules.min_improvement), *rules.gates)


def _compare(
    candidate: Candidate,
    rules: PromotionRules,
    evaluation: run_entries.EvaluationRecorded,
    champion: metric_comparison.Side,
    read_losses: metric_comparison.ReadLosses,
    gate: MetricGate,
) -> MetricDifference | str:
    wanted = next((suite.sha256 for suite in rules.required if suite.name == gate.suite), evaluation.suite_sha256)
    found = [item for item in candidate.evaluations if item.suite_sha256 == wanted and gate.metric in item.metrics]
    alike = (item for item in found if metric_comparison.find_alike(champion.measured, item))
    item = evaluation if not gate.suite and gate.metric in evaluation.metrics else next(alike, next(iter(found), None))
    if item is None:
        return f"{candidate.named} has no {gate.metric} under suite {gate.suite or evaluation.suite}"
    return metric_comparison.compare_metric(gate, item, candidate.run_id, champion, read_losses)


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
    problem = next((item for item in offer.differences if isinstance(item, str)), "")
    return f"{problem}; {_elsewhere(offer.candidate)}" if problem else ""


def _better(offer: _Offer) -> str:
    for number, (gate, difference) in enumerate(zip(all_gates(offer.rules), offer.known, strict=False)):
        key = "promotion.gates" if number else "promotion.min_improvement"
        if problem := metric_comparison.describe_failure(gate, key, difference):
            return f"{problem}; {_elsewhere(offer.candidate)}"
    return ""


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
    first = f"{METRIC} {evaluation.metrics[METRIC]:.4f}, the first one"
    compared = "; ".join(map(metric_comparison.describe_difference, offer.known))
    words = [compared or first, candidate.why, approval.why if approval else ""]
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
        differences=offer.known,
    )


def refusal(
    candidate: Candidate,
    alias: str,
    gate: Gate,
    detail: str,
    evaluation: run_entries.EvaluationRecorded | None = None,
    differences: tuple[MetricDifference, ...] = (),
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
        differences=tuple(item for item in differences if math.isfinite(item.better_by)),
        pin_id=candidate.pin_id,
    )
