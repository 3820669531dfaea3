"""An attempt's entries in the run's log: claim, ranks that were lost or joined, receipt; and its heartbeat.

A claim checks that no live process owns the run, ends a lost attempt and starts the next one. An owner is dead once its
heartbeat has stayed the same for the lease, or for little more than one heartbeat if its process is known to be gone,
on this process's monotonic clock. Safety comes from the log's sequence alone.
The receipt holds the attempt's progress and cost (time up to its last commit is useful), the reason and the decision.
The remedy's entries precede it. An end of unknown outcome can be repeated.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from cairn.model.configuration.data import DataConfig
from cairn.storage.checkpoints.resume_point import begin_again, newest_verified, quarantine_checkpoint
from cairn.storage.errors import Fenced, IntegrityError, NothingReadable, ObjectMissing, StorageError
from cairn.storage.logs import log_entry, run_log, run_members, run_state, step_log
from cairn.storage.logs.run_entries import AttemptEnded, AttemptStarted, DataQuarantined
from cairn.storage.stores.codec import decode, encode, stored_section
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.attempt.injected_faults import injected_faults
from cairn.tasks.configuration.settings import BudgetsConfig, LeaseConfig
from cairn.tasks.errors import BudgetExhausted, InvalidConfiguration, LiveOwner
from cairn.tasks.machine.placement import is_known_alive, is_known_dead, this_placement
from cairn.tasks.machine.process_scopes import running_beside
from cairn.tasks.policy import attempt_sizes, budgets, failures
from cairn.tasks.policy.termination import DecisionAction, TerminationReason

_DEAD_SILENT_BEATS = 1.5
"""Heartbeats for which an owner whose process is gone must be silent: a heartbeat that moves outvotes a missing pid."""

Start = Callable[[int, log_entry.CheckpointReference | None, run_state.RunState], AttemptStarted]
"""Makes the entry from attempt number, resume point and state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimant:
    """The claiming process: its rules, identity and clock; `kubernetes_reason` is why the pod of a host was ended."""

    lease: LeaseConfig
    budgets: BudgetsConfig
    writer: log_entry.Writer
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    start_over: bool = False
    kubernetes_reason: Callable[[str], str] = lambda host: ""


def claim_attempt(log: run_log.RunLog, claimant: Claimant, start: Start) -> AttemptStarted:
    """Append the next attempt-started and return it; it resumes from the newest committed checkpoint that verifies.

    A fork without a commit resumes from the checkpoint it was forked from. Raises `LiveOwner` if another attempt is
    alive or claims first, `BudgetExhausted` if a lost attempt spent the last of the budget, `NothingReadable` if no
    commit verifies and the claimant does not start over, or a fork's beginning does not verify either.
    """
    end_lost_attempt(log, claimant)
    while True:
        refuse_deleted(log.state)
        try:
            at_most = len(log.state.checkpoints) if claimant.start_over else 1
            reference = newest_verified(log, writer=claimant.writer, sleep=claimant.sleep, quarantines_at_most=at_most)
        except NothingReadable:
            if not claimant.start_over or not log.state.commits:
                raise
            here = this_placement(device="cpu", threads=1)
            reference = begin_again(log, here, writer=claimant.writer, sleep=claimant.sleep)
        before = log.state.latest_attempt
        state = log.append(partial(_next_attempt, log, reference, start), writer=claimant.writer)
        if state.open_attempt is not None and state.latest_attempt > before:
            return state.open_attempt.started


def refuse_live_owner(
    log: run_log.RunLog,
    lease: LeaseConfig,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    is_asked_by_person: bool = True,
) -> None:
    """Raise `LiveOwner` if the open attempt shows life within two heartbeats, or is here and has just written one.

    A heartbeat that is fresh by the store's clock is an error at once if a person started the command, who can repeat
    it after killing the owner; a scheduler would not repeat it.
    """
    owner = log.state.open_attempt
    if owner is None or is_known_dead(owner.started.placement):
        return
    patience = 2 * lease.heartbeat_seconds
    read = partial(step_log.read_heartbeat, log.store, log.prefix, owner.started.attempt, owner.started.claim_id)
    seen, until = read(), monotonic() + patience
    age = datetime.now(UTC) - seen.at if seen and seen.at else timedelta.max
    if timedelta() <= age < timedelta(seconds=patience) and is_known_alive(owner.started.placement):
        raise _live_owner(log, owner, "is at work")
    silent = step_log.silent_seconds(log.store, log.prefix, owner.started.attempt) if is_asked_by_person else None
    if silent is not None and abs(silent) < _DEAD_SILENT_BEATS * lease.heartbeat_seconds:
        raise _live_owner(log, owner, f"wrote its heartbeat {max(0.0, silent):.0f} s ago by the store's clock")
    while monotonic() < until:
        sleep(min(0.25, lease.heartbeat_seconds))
        if read() != seen:
            raise _live_owner(log, owner, "still writes its heartbeat")


def end_lost_attempt(log: run_log.RunLog, claimant: Claimant) -> None:
    """End the open attempt, if there is one, as lost once its owner is dead; raises as `claim_attempt` does."""
    owner = log.refresh().open_attempt
    if owner is None:
        return
    number, beat_seconds = owner.started.attempt, claimant.lease.heartbeat_seconds
    read = partial(step_log.read_heartbeat, log.store, log.prefix, number, owner.started.claim_id)
    seen, unchanged_since = read(), claimant.monotonic()
    while True:
        is_dead = is_known_dead(owner.started.placement)
        patience = _DEAD_SILENT_BEATS * beat_seconds if is_dead else claimant.lease.seconds
        if claimant.monotonic() - unchanged_since >= patience:
            break
        claimant.sleep(min(0.5, beat_seconds))
        if read() != seen:
            raise _live_owner(log, owner, "still writes its heartbeat")
        now = log.refresh().open_attempt
        if now is None or now.started.attempt != number:
            break
        if now != owner:  # a commit may come between two heartbeats
            raise _live_owner(log, owner, "still commits")
    last = read() or step_log.Heartbeat(
        attempt=number, beat=0, step=owner.started.first_step, train_loss=None, tokens=0, gpu_seconds=0.0
    )
    evidence = failures.Evidence(
        heartbeat_step=last.step,
        kubernetes_reason=claimant.kubernetes_reason(owner.started.placement.host),
        injected=injected_faults(log.store, log.prefix, owner.started),
    )
    over = AttemptOver(attempt=number, evidence=evidence, last=last, last_seen_at=last.at or owner.started_at)

    def decide(state: run_state.RunState) -> AttemptEnded | None:
        if state.open_attempt is None or state.open_attempt.started.attempt != over.attempt:
            return None
        policy = partial(budgets.decide, claimant.budgets)
        return write_receipt(state, failures.classify(evidence), over, policy, NO_REMEDY)

    state = log.append(decide, writer=claimant.writer)
    ended = state.attempt(over.attempt).ended
    if ended is not None and ended.decision.action == DecisionAction.STOP and ended.decision.charged is not None:
        raise BudgetExhausted(f"run {log.run_id}: {ended.decision.reason}")


def refuse_deleted(state: run_state.RunState) -> None:
    """Raise `InvalidConfiguration` if the run was deleted: it is not trained any more."""
    if deleted := state.closed_to_training():
        raise InvalidConfiguration(f"{deleted}; choose another run id")


def writing_heartbeats(
    store: ObjectStore, run_prefix: str, progress: Callable[[int], step_log.Heartbeat], *, every_seconds: float
) -> AbstractContextManager[None]:
    """Write `progress(number)` at once, every `every_seconds`, and at the end; a silent store costs one heartbeat."""

    def write(stop: threading.Event) -> None:
        number = 0
        while True:
            with suppress(StorageError):
                step_log.write_heartbeat(store, run_prefix, progress(number))
            if stop.is_set():
                return
            stop.wait(every_seconds)
            number += 1

    return running_beside(write, name="heartbeat")


def _next_attempt(
    log: run_log.RunLog, reference: log_entry.CheckpointReference | None, start: Start, state: run_state.RunState
) -> AttemptStarted | None:
    if state.open_attempt is not None:
        raise _live_owner(log, state.open_attempt, "claimed the run first")
    newest = state.newest_committed
    if (newest.committed.reference if newest else state.beginning) != reference:
        return None  # the log changed in between: verify again
    return start(state.latest_attempt + 1, reference, state)


def _live_owner(log: run_log.RunLog, owner: run_state.AttemptRecord, why: str) -> LiveOwner:
    placement = owner.started.placement
    whose = f"attempt {owner.started.attempt} on {placement.host} (pid {placement.pid})"
    return LiveOwner(f"run {log.run_id}: {whose} {why}; wait for it or stop it there")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOver:
    """The facts of an ended attempt: `last` is how far it got, `last_seen_at` when that was if it was lost.

    `jitter` in [0, 1) shortens the next delay, `room` is the memory for the next attempt.
    """

    attempt: int
    evidence: failures.Evidence
    last: step_log.Heartbeat
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
    """A run's data snapshot, its sources, and its copies here; `data` is None where only the log names sources."""

    snapshot_id: str
    data: DataConfig | None
    base_dir: Path
    cache_dir: Path
    work_dir: Path


def end_attempt(
    log: run_log.RunLog, over: AttemptOver, *, limits: BudgetsConfig, origin: DataOrigin, writer: log_entry.Writer
) -> AttemptEnded:
    """Append the remedy and the receipt, and return the receipt; raises `Fenced` if another process ended it."""
    written = log.refresh().attempt(over.attempt).ended
    if written is not None and written.evidence == evidence_document(over.evidence):
        return written
    if log.state.fences(over.attempt):
        raise Fenced(f"run {log.run_id}: attempt {over.attempt} was ended by another process; it writes nothing more")
    failure, report, remedy = failures.classify(over.evidence), over.evidence.last_words, NO_REMEDY
    try:
        if failure.reason is TerminationReason.BAD_DATA:
            # It takes time to import, and only damaged data needs it.
            from cairn.tasks.data.snapshot_build import repair_snapshot

            # Damaged objects are rebuilt at once, because that changes no correct byte.
            copies = (origin.cache_dir, origin.work_dir)
            repaired = repair_snapshot(log.store, origin.snapshot_id, origin.data, origin.base_dir, *copies)
            remedy = Remedy(repaired_objects=repaired, windows=report.windows if report and not repaired else ())
        elif failure.reason is TerminationReason.DIVERGED and report is not None:
            remedy = Remedy(windows=report.windows, before_step=report.spike_step or report.step)
    except (IntegrityError, ObjectMissing) as error:  # no remedy: the manifest or the sources are damaged or gone
        failure = replace(failure, detail=f"{failure.detail}; {error}")
    policy = partial(budgets.decide, limits, jitter=over.jitter)
    receipt = write_receipt(log.refresh(), failure, over, policy, remedy)
    if receipt.decision.action == DecisionAction.RESUME:
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


def write_receipt(
    state: run_state.RunState, failure: failures.Failure, over: AttemptOver, policy: budgets.Policy, remedy: Remedy
) -> AttemptEnded:
    """Return the entry that ends the open attempt of `state`, including the decision on what follows."""
    owner, number, last = state.open_attempt, over.attempt, over.last
    if owner is None or owner.started.attempt != number:
        raise ValueError(f"attempt {number} is not open: only the open attempt can be ended")
    useful = owner.committed_gpu_seconds
    gpu_seconds = max(last.gpu_seconds, useful)
    last_step = max(last.step, owner.last_committed_step or 0)
    before = {window for item in state.quarantines if item.attempt != number for window in item.windows}
    sizes, training = attempt_sizes.sizes_of(owner.started), stored_section(owner.started.config, "training")
    batch, processes = training.get("global_batch", sizes.micro_batch), owner.started.placement.world_size
    mode, halves = training.get("parallel", "ddp"), training.get("on_oom") == "halve"
    less = attempt_sizes.lighter_sizes(sizes, global_batch=batch, processes=processes, mode=mode, halves_first=halves)
    impact = budgets.FailureImpact(
        last_step=last_step,
        sizes=sizes,
        lighter=attempt_sizes.choose_lighter(sizes, less, over.room),
        wasted_gpu_seconds=gpu_seconds - useful,
        quarantined_samples=len(set(remedy.windows) - before),
        repaired_objects=remedy.repaired_objects,
        given_up=over.evidence.stop_signal is not None and over.evidence.exit_code is None,
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
        arithmetic=last.arithmetic,
        starting_seconds=last.starting_seconds,
        last_seen_at=over.last_seen_at,
    )


def evidence_document(evidence: failures.Evidence) -> dict[str, Any]:
    """Return the evidence as JSON for the receipt; the last lines of stderr are a separate field there."""
    return decode(encode(replace(evidence, stderr_tail=())), dict, where="evidence")


def record_members(
    log: run_log.RunLog, change: run_members.MembersChanged, limits: BudgetsConfig, writer: log_entry.Writer
) -> bool:
    """Append the change, a loss charged as an attempt's end would be; return False if the budget does not allow it.

    Then nothing is appended: the attempt has to end, and its receipt is charged.
    """
    failure = failures.Failure(reason=TerminationReason.LOST, detail=change.detail, fingerprint="rank")

    def decide(state: run_state.RunState) -> run_members.MembersChanged | None:
        owner = state.open_attempt
        if owner is None or owner.started.attempt != change.attempt or change in state.member_changes:
            return None
        if not change.charged:
            return change
        impact = budgets.FailureImpact(last_step=change.step, sizes=attempt_sizes.sizes_of(owner.started))
        decision = budgets.decide(limits, state, failure, impact)
        return change if decision.action == DecisionAction.RESUME else None

    return change in log.append(decide, writer=writer).member_changes
