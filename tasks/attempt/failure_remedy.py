"""What can be different next time: damaged data made anew, guilty samples left out, a spike gone back behind.

Owns finding the remedy and its entries in the log. Refuses to decide whether there is a next time: the budgets do.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from model.configuration.data import DataConfig
from storage.checkpoints.checkpoint import quarantine_checkpoint
from storage.logs.log_entry import Writer
from storage.logs.run_entries import DataQuarantined
from storage.logs.run_log import RunLog
from storage.logs.run_state import CheckpointRecord, RunState
from tasks.attempt.attempt_receipt import NO_REMEDY, Remedy
from tasks.data.snapshot_build import repair_snapshot
from tasks.policy.failures import ExceptionReport, Failure
from tasks.policy.termination import TerminationReason


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOrigin:
    """Where a run's tokens lie and what they were made from."""

    snapshot_id: str
    data: DataConfig
    base_dir: Path
    cache_dir: Path


def find_remedy(log: RunLog, failure: Failure, words: ExceptionReport | None, origin: DataOrigin) -> Remedy:
    """Return what can be done; damaged objects are made anew at once, which changes nothing that was right.

    Raises `SnapshotDamaged` where data is damaged and cannot be made anew.
    """
    if failure.reason is TerminationReason.BAD_DATA:
        repaired = repair_snapshot(log.store, origin.snapshot_id, origin.data, origin.base_dir, origin.cache_dir)
        if repaired:
            return Remedy(repaired_objects=repaired)
        return Remedy(windows=words.windows if words else ())
    if failure.reason is TerminationReason.DIVERGED and words is not None:
        return Remedy(windows=words.windows, before_step=words.spike_step or words.step)
    return NO_REMEDY


def apply_remedy(log: RunLog, remedy: Remedy, failure: Failure, *, attempt: int, writer: Writer) -> None:
    """Append what later attempts must know: samples never drawn again, checkpoints of a spike not resumed from."""
    if remedy.windows:
        body = DataQuarantined(
            attempt=attempt,
            reason=failure.reason,
            windows=tuple(sorted(set(remedy.windows))),
            detail=failure.detail,
        )
        log.append(partial(_unless_quarantined, body), writer=writer)
    if remedy.before_step is not None:
        _go_back(log, remedy.before_step, failure, writer)


def _unless_quarantined(body: DataQuarantined, state: RunState) -> DataQuarantined | None:
    return None if set(body.windows) <= state.quarantined_windows else body


def _go_back(log: RunLog, before_step: int, failure: Failure, writer: Writer) -> None:
    """Quarantine what was committed in the spike; the oldest readable one stays: there must be somewhere to begin."""
    while True:
        spoiled = _spoiled(log.refresh(), before_step)
        if spoiled is None:
            return
        why = f"committed when the spike had begun at step {before_step}: {failure.detail}"
        quarantine_checkpoint(log, spoiled.committed, why, writer=writer)


def _spoiled(state: RunState, before_step: int) -> CheckpointRecord | None:
    readable = state.readable
    return next((record for record in readable[:-1] if record.committed.step >= before_step), None)
