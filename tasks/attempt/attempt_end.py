"""The end of an attempt: classified, remedied where it can be, decided, and put on record.

Owns that order: the remedy's entries precede the receipt, so that whoever reads the receipt finds them. Doing it again
after an unknown outcome changes nothing. Refuses to gather evidence.
"""

from dataclasses import dataclass

from storage.errors import Fenced, SnapshotDamaged
from storage.logs.log_entry import Writer
from storage.logs.run_entries import AttemptEnded
from storage.logs.run_log import RunLog
from tasks.attempt.attempt_receipt import NO_REMEDY, Remedy, Usage, shown_evidence, write_receipt
from tasks.attempt.failure_remedy import DataOrigin, apply_remedy, find_remedy
from tasks.configuration.settings import BudgetsConfig
from tasks.policy.failures import Evidence, Failure, classify
from tasks.policy.termination import DecisionAction


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOver:
    """What is known when an attempt is over."""

    attempt: int
    evidence: Evidence
    usage: Usage
    jitter: float = 0.0


def end_attempt(
    log: RunLog, over: AttemptOver, *, budgets: BudgetsConfig, origin: DataOrigin, writer: Writer
) -> AttemptEnded:
    """Append the receipt and what its decision rests on, and return it; raises `Fenced` where another ended it."""
    written = _already_written(log, over)
    if written is not None:
        return written
    if log.state.fences(over.attempt):
        raise Fenced(f"run {log.run_id}: attempt {over.attempt} was ended by somebody else; it says nothing more")
    failure, remedy = _remedied(log, over.evidence, origin)
    planned = write_receipt(
        log.refresh(),
        failure,
        over.usage,
        budgets=budgets,
        evidence=over.evidence,
        remedy=remedy,
        jitter=over.jitter,
    )
    if planned.decision.action == DecisionAction.RESUME:
        apply_remedy(log, remedy, failure, attempt=over.attempt, writer=writer)
    log.append(lambda state: planned, writer=writer)
    return planned


def _already_written(log: RunLog, over: AttemptOver) -> AttemptEnded | None:
    record = next(item for item in log.refresh().attempts if item.started.attempt == over.attempt)
    mine = record.ended is not None and record.ended.evidence == shown_evidence(over.evidence)
    return record.ended if mine else None


def _remedied(log: RunLog, evidence: Evidence, origin: DataOrigin) -> tuple[Failure, Remedy]:
    failure = classify(evidence)
    try:
        return failure, find_remedy(log, failure, evidence.last_words, origin)
    except SnapshotDamaged as error:
        detail = f"{failure.detail}; {error}"
        return Failure(reason=failure.reason, detail=detail, fingerprint=failure.fingerprint), NO_REMEDY
