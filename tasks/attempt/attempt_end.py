"""The end of an attempt: classify it, find a remedy, decide what follows, append the receipt.

The receipt holds the attempt's progress and cost (time up to its last commit is useful), the reason and the decision.
The remedy's entries precede it. An end of unknown outcome can be repeated.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from cairn.model.configuration.data import DataConfig
from cairn.storage.checkpoints.resume_point import quarantine_checkpoint
from cairn.storage.errors import Fenced, IntegrityError, ObjectMissing
from cairn.storage.logs.log_entry import Writer
from cairn.storage.logs.run_entries import AttemptEnded, DataQuarantined
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import Heartbeat
from cairn.storage.stores.document import decode, encode
from cairn.tasks.configuration.settings import BudgetsConfig
from cairn.tasks.policy import attempt_sizes, failures, termination
from cairn.tasks.policy.budgets import FailureImpact, Policy, decide


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOver:
    """The facts of an ended attempt: `last` is how far it got, `last_seen_at` when that was if it was lost.

    `jitter` in [0, 1) shortens the next delay, `room` is the memory for the next attempt.
    """

    attempt: int
    evidence: failures.Evidence
    last: Heartbeat
    last_seen_at: datetime | None = None
    jitter: float = 0.0
    room: attempt_sizes.MemoryRoom | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """The remedy for bad data: quarantine of `windows`, and of checkpoints from a spike's `before_step` on."""

    windows: tuple[int, ...] = ()
    repaired_objects: tuple[str, ...] = ()
    before_step: int | None = None


NO_REMEDY = Remedy()


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
    failure, remedy = failures.classify(over.evidence), NO_REMEDY
    try:
        remedy = _find_remedy(log, failure, over.evidence.last_words, origin)
    except (IntegrityError, ObjectMissing) as error:  # no remedy: the manifest or the sources are damaged or gone
        failure = replace(failure, detail=f"{failure.detail}; {error}")
    policy = partial(decide, budgets, jitter=over.jitter)
    receipt = write_receipt(log.refresh(), failure, over, policy=policy, remedy=remedy)
    if receipt.decision.action == termination.DecisionAction.RESUME:
        if remedy.windows:
            windows = tuple(sorted(set(remedy.windows)))
            body = DataQuarantined(attempt=over.attempt, reason=failure.reason, windows=windows, detail=failure.detail)
            log.append(lambda state: None if set(windows) <= state.quarantined_windows else body, writer=writer)
        if (before := remedy.before_step) is not None:
            # The oldest readable checkpoint stays, so that there is always one to resume from.
            while spoiled := [one.committed for one in log.refresh().readable[:-1] if one.committed.step >= before]:
                why = f"committed when the spike had begun at step {before}: {failure.detail}"
                quarantine_checkpoint(log, spoiled[0], why, writer=writer)
    log.append(lambda state: receipt, writer=writer)
    return receipt


def _find_remedy(
    log: RunLog, failure: failures.Failure, report: failures.ExceptionReport | None, origin: DataOrigin
) -> Remedy:
    """Damaged objects are rebuilt at once, because that changes no correct byte."""
    if failure.reason is termination.TerminationReason.BAD_DATA:
        from cairn.tasks.data.snapshot_build import (
            repair_snapshot,  # takes time to import, and only damaged data needs it
        )

        repaired = repair_snapshot(log.store, origin.snapshot_id, origin.data, origin.base_dir, origin.cache_dir)
        return Remedy(repaired_objects=repaired, windows=report.windows if report and not repaired else ())
    if failure.reason is termination.TerminationReason.DIVERGED and report is not None:
        return Remedy(windows=report.windows, before_step=report.spike_step or report.step)
    return NO_REMEDY


def write_receipt(
    state: RunState, failure: failures.Failure, over: AttemptOver, *, policy: Policy, remedy: Remedy = NO_REMEDY
) -> AttemptEnded:
    """Return the entry that ends the open attempt of `state`, including the decision on what follows."""
    owner, number, last = state.open_attempt, over.attempt, over.last
    if owner is None or owner.started.attempt != number:
        raise ValueError(f"attempt {number} is not open: only the open attempt can be ended")
    useful = owner.committed_gpu_seconds
    gpu_seconds = max(last.gpu_seconds, useful)
    last_step = max(last.step, owner.last_committed_step or 0)
    before = {window for item in state.quarantines if item.attempt != number for window in item.windows}
    sizes, training = attempt_sizes.sizes_of(owner.started), owner.started.config.get("training", {})
    lighter = attempt_sizes.lighter_sizes(
        sizes,
        global_batch=training.get("global_batch", sizes.micro_batch),
        processes=owner.started.placement.world_size,
        mode=training.get("parallel", "ddp"),
        halves_first=training.get("on_oom") == "halve",
    )
    impact = FailureImpact(
        last_step=last_step,
        sizes=sizes,
        lighter=attempt_sizes.choose_lighter(sizes, lighter, over.room),
        wasted_gpu_seconds=gpu_seconds - useful,
        quarantined_samples=len(set(remedy.windows) - before),
        repaired_objects=remedy.repaired_objects,
    )
    return AttemptEnded(
        attempt=number,
        reason=failure.reason,
        detail=failure.detail,
        fingerprint=failure.fingerprint,
        last_step=last_step,
        tokens=max(last.tokens, owner.committed_tokens),
        gpu_seconds=gpu_seconds,
        useful_gpu_seconds=useful,
        wasted_gpu_seconds=gpu_seconds - useful,
        stderr_tail=over.evidence.stderr_tail,
        decision=policy(state, failure, impact),
        evidence=evidence_document(over.evidence),
        peak=last.peak,
        starting_seconds=last.starting_seconds,
        last_seen_at=over.last_seen_at,
    )


def evidence_document(evidence: failures.Evidence) -> dict[str, Any]:
    """Return the evidence as JSON for the receipt; the last lines of stderr are a separate field there."""
    return decode(encode(replace(evidence, stderr_tail=())), dict, where="evidence")
