"""Claiming a run: check that no live process owns it, end a lost attempt, start the next one; and its heartbeat.

An owner is dead once its heartbeat has stayed the same for the lease, or for little more than one heartbeat if its
process is known to be gone, on this process's monotonic clock. Safety comes from the log's sequence alone.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from cairn.storage.checkpoints.resume_point import newest_verified
from cairn.storage.errors import NothingReadable, StorageError
from cairn.storage.logs import log_entry, run_entries, run_log, run_state, step_log
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.attempt.attempt_end import AttemptOver, write_receipt
from cairn.tasks.attempt.injected_faults import injected_faults
from cairn.tasks.configuration.settings import BudgetsConfig, LeaseConfig
from cairn.tasks.errors import BudgetExhausted, InvalidConfiguration, LiveOwner
from cairn.tasks.machine.placement import is_known_alive, is_known_dead
from cairn.tasks.machine.process_scopes import running_beside
from cairn.tasks.policy import budgets, failures
from cairn.tasks.policy.termination import DecisionAction

_DEAD_SILENT_BEATS = 1.5
"""Heartbeats for which an owner whose process is gone must be silent: a heartbeat that moves outvotes a missing pid."""

Start = Callable[[int, log_entry.CheckpointReference | None, run_state.RunState], run_entries.AttemptStarted]
"""Makes the entry from attempt number, resume point and state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimant:
    """The claiming process: its rules, identity and clock; `kubernetes_reason` is why the pod of a host was ended."""

    lease: LeaseConfig
    budgets: BudgetsConfig
    writer: log_entry.Writer
    monotonic: Callable[[], float]
    sleep: Callable[[float], None]
    start_over: bool = False
    kubernetes_reason: Callable[[str], str] = lambda host: ""


def claim_attempt(log: run_log.RunLog, claimant: Claimant, start: Start) -> run_entries.AttemptStarted:
    """Append the next attempt-started and return it; it resumes from the newest committed checkpoint that verifies.

    A fork without a commit resumes from the checkpoint it was forked from. Raises `LiveOwner` if another attempt is
    alive or claims first, `BudgetExhausted` if a lost attempt spent the last of the budget, `NothingReadable` if no
    commit verifies and the claimant does not start over.
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
            reference = log.state.beginning
        before = log.state.latest_attempt
        state = log.append(partial(_next_attempt, log, reference, start), writer=claimant.writer)
        if state.open_attempt is not None and state.latest_attempt > before:
            return state.open_attempt.started


def refuse_live_owner(
    log: run_log.RunLog,
    lease: LeaseConfig,
    *,
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
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
    seen, until = step_log.read_heartbeat(log.store, log.prefix, owner.started.attempt), monotonic() + patience
    age = datetime.now(UTC) - seen.at if seen and seen.at else timedelta.max
    if timedelta() <= age < timedelta(seconds=patience) and is_known_alive(owner.started.placement):
        raise _live_owner(log, owner, "is at work")
    silent = step_log.silent_seconds(log.store, log.prefix, owner.started.attempt) if is_asked_by_person else None
    if silent is not None and abs(silent) < _DEAD_SILENT_BEATS * lease.heartbeat_seconds:
        raise _live_owner(log, owner, f"wrote its heartbeat {max(0.0, silent):.0f} s ago by the store's clock")
    while monotonic() < until:
        sleep(min(0.25, lease.heartbeat_seconds))
        if step_log.read_heartbeat(log.store, log.prefix, owner.started.attempt) != seen:
            raise _live_owner(log, owner, "still writes its heartbeat")


def end_lost_attempt(log: run_log.RunLog, claimant: Claimant) -> None:
    """End the open attempt, if there is one, as lost once its owner is dead; raises as `claim_attempt` does."""
    owner = log.refresh().open_attempt
    if owner is None:
        return
    number, beat_seconds = owner.started.attempt, claimant.lease.heartbeat_seconds
    seen, unchanged_since = step_log.read_heartbeat(log.store, log.prefix, number), claimant.monotonic()
    while True:
        is_dead = is_known_dead(owner.started.placement)
        patience = _DEAD_SILENT_BEATS * beat_seconds if is_dead else claimant.lease.seconds
        if claimant.monotonic() - unchanged_since >= patience:
            break
        claimant.sleep(min(0.5, beat_seconds))
        if step_log.read_heartbeat(log.store, log.prefix, number) != seen:
            raise _live_owner(log, owner, "still writes its heartbeat")
        now = log.refresh().open_attempt
        if now is None or now.started.attempt != number:
            break
        if now != owner:  # a commit may come between two heartbeats
            raise _live_owner(log, owner, "still commits")
    _end_as_lost(log, owner, claimant)


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
) -> run_entries.AttemptStarted | None:
    if state.open_attempt is not None:
        raise _live_owner(log, state.open_attempt, "claimed the run first")
    newest = state.newest_committed
    if (newest.committed.reference if newest else state.beginning) != reference:
        return None  # the log changed in between: verify again
    return start(state.latest_attempt + 1, reference, state)


def _end_as_lost(log: run_log.RunLog, owner: run_state.AttemptRecord, claimant: Claimant) -> None:
    number = owner.started.attempt
    last = step_log.read_heartbeat(log.store, log.prefix, number) or step_log.Heartbeat(
        attempt=number, beat=0, step=owner.started.first_step, train_loss=None, tokens=0, gpu_seconds=0.0
    )
    evidence = failures.Evidence(
        heartbeat_step=last.step,
        kubernetes_reason=claimant.kubernetes_reason(owner.started.placement.host),
        injected=injected_faults(log.store, log.prefix, owner.started),
    )
    over = AttemptOver(attempt=number, evidence=evidence, last=last, last_seen_at=last.at or owner.started_at)

    def decide(state: run_state.RunState) -> run_entries.AttemptEnded | None:
        if state.open_attempt is None or state.open_attempt.started.attempt != over.attempt:
            return None
        return write_receipt(state, failures.classify(evidence), over, policy=partial(budgets.decide, claimant.budgets))

    state = log.append(decide, writer=claimant.writer)
    ended = state.attempt(over.attempt).ended
    if ended is not None and ended.decision.action == DecisionAction.STOP and ended.decision.charged is not None:
        raise BudgetExhausted(f"run {log.run_id}: {ended.decision.reason}")


def _live_owner(log: run_log.RunLog, owner: run_state.AttemptRecord, why: str) -> LiveOwner:
    placement = owner.started.placement
    return LiveOwner(
        f"run {log.run_id}: attempt {owner.started.attempt} on {placement.host} (pid {placement.pid}) {why}; "
        "wait for it or stop it there"
    )
