"""The end of an attempt: classify it, find a remedy, decide what follows, append the receipt.

The remedy's entries precede the receipt, whose readers find them. An end of unknown outcome can be repeated.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from model.configuration.data import DataConfig
from storage.checkpoints.resume_point import quarantine_checkpoint
from storage.errors import Fenced, IntegrityError, ObjectMissing
from storage.logs.log_entry import Writer
from storage.logs.run_entries import AttemptEnded, DataQuarantined
from storage.logs.run_log import RunLog
from tasks.attempt.attempt_receipt import NO_REMEDY, AttemptOver, Remedy, evidence_document, write_receipt
from tasks.configuration.settings import BudgetsConfig
from tasks.data.snapshot_build import repair_snapshot
from tasks.policy.failures import ExceptionReport, Failure, classify
from tasks.policy.termination import DecisionAction, TerminationReason


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOrigin:
    """A run's data snapshot, and the folders to rebuild it from; `data` is None where only the log names sources."""

    snapshot_id: str
    data: DataConfig | None
    base_dir: Path
    cache_dir: Path


def end_attempt(
    log: RunLog, over: AttemptOver, *, budgets: BudgetsConfig, origin: DataOrigin, writer: Writer
) -> AttemptEnded:
    """Append the remedy and the receipt, and return the receipt; raises `Fenced` if another process ended it."""
    written = log.refresh().attempt(over.attempt).ended
    if written is not None and written.evidence == evidence_document(over.evidence):
        return written
    if log.state.fences(over.attempt):
        raise Fenced(f"run {log.run_id}: attempt {over.attempt} was ended by another process; it writes nothing more")
    failure, remedy = classify(over.evidence), NO_REMEDY
    try:
        remedy = _find_remedy(log, failure, over.evidence.last_words, origin)
    except (IntegrityError, ObjectMissing) as error:  # no remedy: the manifest or the sources are damaged or gone
        failure = replace(failure, detail=f"{failure.detail}; {error}")
    receipt = write_receipt(log.refresh(), failure, over, budgets=budgets, remedy=remedy)
    if receipt.decision.action == DecisionAction.RESUME:
        _apply_remedy(log, remedy, failure, over.attempt, writer)
    log.append(lambda state: receipt, writer=writer)
    return receipt


def _find_remedy(log: RunLog, failure: Failure, report: ExceptionReport | None, origin: DataOrigin) -> Remedy:
    """Damaged objects are rebuilt at once, because that changes no correct byte."""
    if failure.reason is TerminationReason.BAD_DATA:
        repaired = repair_snapshot(log.store, origin.snapshot_id, origin.data, origin.base_dir, origin.cache_dir)
        return Remedy(repaired_objects=repaired, windows=report.windows if report and not repaired else ())
    if failure.reason is TerminationReason.DIVERGED and report is not None:
        return Remedy(windows=report.windows, before_step=report.spike_step or report.step)
    return NO_REMEDY


def _apply_remedy(log: RunLog, remedy: Remedy, failure: Failure, attempt: int, writer: Writer) -> None:
    if remedy.windows:
        windows = tuple(sorted(set(remedy.windows)))
        body = DataQuarantined(attempt=attempt, reason=failure.reason, windows=windows, detail=failure.detail)
        log.append(lambda state: None if set(windows) <= state.quarantined_windows else body, writer=writer)
    if (before := remedy.before_step) is None:
        return
    # The oldest readable checkpoint stays, so that there is always one to resume from.
    while spoiled := [record.committed for record in log.refresh().readable[:-1] if record.committed.step >= before]:
        why = f"committed when the spike had begun at step {before}: {failure.detail}"
        quarantine_checkpoint(log, spoiled[0], why, writer=writer)
