"""The gates before a promotion, of which the first that refuses is recorded, and offers of a checkpoint to an alias.

An offer pins its checkpoint in the run's log before the registry may point at it, so that no sweep deletes it in
between. The gates are pure functions, asked again on the newest registry at every append: of two concurrent offers the
slower one is compared with the new champion.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from cairn.storage.checkpoints.resume_point import new_pin, pin_checkpoint, unpin_checkpoint
from cairn.storage.logs import log_entry, run_entries, run_log, run_state
from cairn.storage.logs.registry import MetricDifference, Promoted, Refused, Registry, RegistryState, SuiteReference
from cairn.tasks.checkpoints import metric_comparison
from cairn.tasks.configuration.settings import METRIC, MetricGate
from cairn.tasks.configuration.stored_configuration import parse_stored_configuration
from cairn.tasks.errors import GateRefused
from cairn.tasks.machine.placement import this_placement
from cairn.tasks.policy import run_set


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


def evaluations_of(state: run_state.RunState, manifest_sha256: str) -> tuple[run_entries.EvaluationRecorded, ...]:
    """Return every evaluation of exactly these weights, newest first."""
    return tuple(reversed(state.evaluations_of(manifest_sha256)))


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
    # Compared is the evaluation that was measured like the champion, else that under the primary suite.
    suites = [suite.sha256 for suite in rules.required[:1]] or [item.suite_sha256 for item in candidate.evaluations[:1]]
    suites += [champion.suite_sha256] if champion else []
    found = [item for suite in suites for item in candidate.evaluations if item.suite_sha256 == suite]
    alike = [item for item in found if champion is None or metric_comparison.is_measured_like(item, champion)]
    evaluation, compared = next(iter([*alike, *found]), None), list[tuple[MetricGate, MetricDifference | str]]()
    if champion is not None and evaluation is not None and METRIC in evaluation.metrics:
        measured: tuple[metric_comparison.Measured, ...] = (*read_evaluations(champion), champion)
        named = f"{champion.run_id}@{champion.step}"
        side = metric_comparison.Side(named=named, run_id=champion.run_id, measured=measured)
        required = {suite.name: suite.sha256 for suite in rules.required}
        for gate in (MetricGate(margin=rules.min_improvement), *rules.gates):
            wanted, metric = required.get(gate.suite, evaluation.suite_sha256), gate.metric
            fitting = [one for one in candidate.evaluations if one.suite_sha256 == wanted and metric in one.metrics]
            alike = [one for one in fitting if metric_comparison.find_alike(measured, one)]
            chosen = [evaluation] if not gate.suite and metric in evaluation.metrics else [*alike, *fitting]
            missing = f"{candidate.named} has no {metric} under suite {gate.suite or evaluation.suite}"
            compare = metric_comparison.compare_metric
            difference = compare(gate, chosen[0], candidate.run_id, side, read_losses) if chosen else missing
            compared.append((gate, difference))
    known = tuple(difference for _, difference in compared if isinstance(difference, MetricDifference))
    if refused := next(_find_problems(candidate, rules, evaluation, compared), None):
        return refusal(candidate, alias, *refused, evaluation, known)
    assert evaluation is not None
    return _promoted(candidate, rules, evaluation, alias=alias, champion=champion, differences=known)


def refuse_unreadable(candidate: Candidate, alias: str) -> Refused:
    """Return the refusal of a checkpoint that is no longer committed, so that nothing protects its bytes."""
    problem = "this checkpoint is no longer committed in the run's log, and its bytes may be deleted"
    advice = f"`cairn checkpoints {candidate.run_id}` lists those that can be promoted"
    return refusal(candidate, alias, Gate.READABLE, f"{problem}; {advice}")


def decision_on_record(state: RegistryState, manifest_sha256: str) -> Promoted | Refused | None:
    """Return the last decision on an offer of these weights, rolled back since or not; None if there is none."""
    for _, body in reversed(state.history):
        is_abandoned = isinstance(body, Refused) and body.gate == Gate.ABANDONED
        if isinstance(body, Promoted | Refused) and body.manifest_sha256 == manifest_sha256 and not is_abandoned:
            return body
    return None


def _find_problems(
    candidate: Candidate,
    rules: PromotionRules,
    evaluation: run_entries.EvaluationRecorded | None,
    compared: Sequence[tuple[MetricGate, MetricDifference | str]],
) -> Iterator[tuple[Gate, str]]:
    """Yield each gate that refuses, in the order in which they are asked, with the problem and the remedy."""
    named, approval = candidate.named, candidate.approval
    measured = {item.suite_sha256 for item in candidate.evaluations}
    missing = [suite.name for suite in rules.required[:1] if evaluation is None]
    missing += [suite.name for suite in rules.required[1:] if suite.sha256 not in measured]
    if evaluation is None or missing:
        which = f"suite {', '.join(missing)}" if missing else "any suite"
        problem = f"manifest {candidate.reference.manifest_sha256[:8]} has no evaluation on record under {which}"
        advice = f"`cairn evaluate {named}` measures it, then `cairn promote {named}` offers it again"
        yield Gate.EVALUATED, f"{problem}; {advice}"
        return
    values = {METRIC: evaluation.metrics.get(METRIC, math.nan)}
    required = {suite.sha256 for suite in rules.required}
    for item in candidate.evaluations:
        if item is evaluation or item.suite_sha256 in required:
            values |= {f"{name} ({item.suite})": value for name, value in item.metrics.items()}
    if broken := ", ".join(f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)):
        advice = "it must be a finite number; offer an earlier step, `cairn evaluations` lists them"
        yield Gate.FINITE, f"{broken}: {advice}"
    if evaluation.verdict is not None and (kind := evaluation.verdict.kind) in rules.refuse_verdicts:
        problem = f"the loss curve up to this evaluation is {kind}, and promotion.refuse_verdicts names it"
        yield Gate.VERDICT, f"{problem}; `cairn diagnose {candidate.run_id}` explains why and how to fix it"
    elsewhere = f"`cairn promote {named} --alias NAME` promotes to another alias"
    if problem := next((difference for _, difference in compared if isinstance(difference, str)), ""):
        yield Gate.COMPARABLE, f"{problem}; {elsewhere}"
    for number, (gate, difference) in enumerate(compared):
        key = "promotion.gates" if number else "promotion.min_improvement"
        if not isinstance(difference, str) and (problem := metric_comparison.describe_failure(gate, key, difference)):
            yield Gate.BETTER, f"{problem}; {elsewhere}"
    if rules.needs_approval and approval is None:
        advice = f"a person approves it with `cairn promote {named}`"
        yield Gate.APPROVED, f"promotion.require_approval: it is not approved; {advice}"
    elif rules.needs_approval and approval is not None and not approval.is_given:
        problem = f"{approval.by} refused it{f': {approval.why}' if approval.why else ''}"
        yield Gate.APPROVED, f"{problem}; `cairn promote {named}` offers it again"


def _promoted(
    candidate: Candidate,
    rules: PromotionRules,
    evaluation: run_entries.EvaluationRecorded,
    *,
    alias: str,
    champion: Promoted | None,
    differences: tuple[MetricDifference, ...],
) -> Promoted:
    approval = candidate.approval
    first = f"{METRIC} {evaluation.metrics[METRIC]:.4f}, the first one"
    compared = "; ".join(f"{one.metric} {one.value:.4f}, before {one.before:.4f}: {one}" for one in differences)
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
        required=rules.required,
        verdict=evaluation.verdict.kind if evaluation.verdict else None,
        by=approval.by if approval else candidate.by,
        why=": ".join(dict.fromkeys(filter(None, words))),
        previous=champion.manifest_sha256 if champion else None,
        pin_id=candidate.pin_id,
        differences=differences,
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
        return evaluations_of(run_log.RunLog(log.store, champion.run_id).refresh(), champion.manifest_sha256)

    read_losses = metric_comparison.losses_reader(log.store)
    return decide_promotion(state, candidate, rules, alias=alias, read_evaluations=read, read_losses=read_losses)
