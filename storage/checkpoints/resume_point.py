"""The checkpoint that a start resumes from: the newest one that verifies; and the pins of checkpoints.

A start checks manifest and sizes; the bytes are verified when they are loaded. If an attempt could not load them, a
start reads them, from the store and not from a cache. A checkpoint that fails every read is quarantined with the
evidence, at most one a start, because this host may be at fault. If it verifies later, it is taken back.
A fork's beginning is pinned before the fork is opened. A process that dies between pin and opening may have sent the
opening entry already: a sweep first takes the number under which it would arrive, and only then ends the pin.
"""

import socket
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from cairn.storage.checkpoints import checkpoint
from cairn.storage.checkpoints.checkpoint_shard import READ_TRIES, ReadPolicy
from cairn.storage.errors import IntegrityError, NothingReadable, ObjectDamaged, WriterTooOld
from cairn.storage.logs import run_entries
from cairn.storage.logs.log_entry import CheckpointReference, Writer
from cairn.storage.logs.run_entries import CheckpointCommitted, CheckpointPinned, ReadEvidence
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import CheckpointRecord, RunState
from cairn.storage.stores import codec, local_store
from cairn.storage.stores.object_store import ObjectStore

_PAUSE_SECONDS = 0.5
_ELSEWHERE = "Start on another host, restore its objects"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Whether one thing is no longer needed, and why; `key` is a checkpoint's folder or a pin's id."""

    key: str
    is_over: bool
    why: str


def newest_verified(
    log: RunLog, *, writer: Writer, sleep: Callable[[float], None] = time.sleep, quarantines_at_most: int = 1
) -> CheckpointReference | None:
    """Return the newest checkpoint that verifies; without a commit that of another run for a fork, else None.

    Bytes are read only of a checkpoint that an attempt could not load, that may be restored, or that follows one that
    fails here. Those that fail are quarantined, a quarantined one that verifies is taken back. Raises
    `NothingReadable` if there were commits and none verifies (a person decides whether the run starts over), and
    `IntegrityError` when more would have to be quarantined than one host may say of a store at a time.
    """
    failed, quarantined = list[CheckpointRecord](), 0
    while True:
        state = log.refresh()
        known = {record.committed.prefix for record in failed}
        candidates = (item for item in reversed(state.live_checkpoints) if item.is_committed or item.may_be_restored)
        record = next((item for item in candidates if item.committed.prefix not in known), None)
        if record is None and state.commits:  # it is advised to start over only where that is possible
            lost = state.checkpoints[-1]
            problem = f"run {log.run_id} has committed {state.commits} checkpoints and none can be read; the newest, "
            problem += f"step {lost.committed.step}, is {lost.state}: {lost.detail}"
            try:
                beginning = verified_beginning(log, sleep=sleep)
            except NothingReadable as error:
                raise NothingReadable(f"{problem}; {error}") from error
            over = f"start over at step {beginning.step if beginning else 0} with `cairn train --start-over`"
            raise NothingReadable(f"{problem}. {_ELSEWHERE}, or {over}")
        if record is None:
            return verified_beginning(log, sleep=sleep)
        committed, reads = record.committed, READ_TRIES if record.is_committed else 1
        trusted = record.is_committed and not quarantined and not state.is_doubted(committed.reference)
        policy = ReadPolicy(tries=reads, sleep=sleep)
        evidence = collect_evidence(log, committed, record.suspects, policy=policy, sizes_only=trusted)
        if not evidence:
            if not record.is_committed:
                log.append(partial(restored_entry, committed), writer=writer)
            return committed.reference
        failed.append(record)
        if record.is_committed:
            if quarantined == quarantines_at_most:
                steps = " and ".join(str(item.committed.step) for item in failed[-2:])
                raise IntegrityError(
                    f"run {log.run_id}: the checkpoints of steps {steps} cannot be read here ({_describe(evidence)}), "
                    f"so host {evidence[0].host} or its way to the store may be at fault and only the first is "
                    "quarantined. Start on another host, which takes it back if it verifies there; if they are "
                    "damaged, run the same command again: each start gives up one"
                )
            quarantine_checkpoint(log, committed, _describe(evidence), evidence=evidence, writer=writer)
            quarantined += 1


def collect_evidence(
    log: RunLog, reference: CheckpointReference, suspects: tuple[str, ...], *, policy: ReadPolicy, sizes_only: bool
) -> tuple[ReadEvidence, ...]:
    """Return the evidence against a checkpoint that fails every read, or none as soon as one read succeeds.

    The objects in `suspects` are read first. After a failed read the log is read: if that fails too, the store is
    unavailable and its error is raised.
    """
    damaged: tuple[ObjectDamaged, ...] = ()
    for number in range(policy.tries):
        if number:
            policy.sleep(_PAUSE_SECONDS * 2**number)
        for path in filter(None, map(log.store.local_path, suspects)):
            local_store.forget_cached_bytes(path)
        damaged = checkpoint.verify_checkpoint(log.store, reference, only=suspects) if suspects else ()
        damaged = damaged or checkpoint.verify_checkpoint(log.store, reference, sizes_only=sizes_only)
        if not damaged:
            return ()
        suspects = tuple(item.key for item in damaged)
        log.refresh()
    evidence = partial(ReadEvidence, reads=policy.tries, host=socket.gethostname())
    return tuple(evidence(key=item.key, expected=item.expected, found=item.found) for item in damaged)


def quarantine_checkpoint(
    log: RunLog, committed: CheckpointCommitted, detail: str, *, evidence: tuple[ReadEvidence, ...] = (), writer: Writer
) -> RunState:
    """Append that no resume uses this checkpoint any more, and why, unless it is no longer committed."""
    body = run_entries.CheckpointQuarantined(**asdict(committed.reference), detail=detail, evidence=evidence)
    return log.append(
        lambda state: body if any(record.committed.prefix == body.prefix for record in state.readable) else None,
        writer=writer,
    )


def restored_entry(committed: CheckpointCommitted, state: RunState) -> run_entries.CheckpointRestored | None:
    """Return the entry that takes a checkpoint back, or None when it is not quarantined for its bytes any more."""
    record = state.find_live(committed.prefix)
    if record is None or not record.may_be_restored:
        return None
    detail = f"every object verified on host {socket.gethostname()}"
    return run_entries.CheckpointRestored(**asdict(committed.reference), detail=detail)


def fails_alike(fresh: Collection[ReadEvidence], before: Collection[ReadEvidence]) -> bool:
    """Whether a fresh read failed as before: at the same object, again unreadable or again with other bytes."""
    unreadable = {item.key: item.found.startswith(checkpoint.UNREADABLE) for item in before}
    return any(unreadable.get(item.key) is item.found.startswith(checkpoint.UNREADABLE) for item in fresh)


def new_pin(reference: CheckpointReference, pinned_by: run_entries.Placement, **purpose: Any) -> CheckpointPinned:
    """Return a pin with a new id, for the `alias`, `suite_sha256` or `fork`; it counts once it is appended."""
    return CheckpointPinned(**asdict(reference), pin_id=uuid.uuid4().hex, pinned_by=pinned_by, **purpose)


def pin_checkpoint(log: RunLog, pin: CheckpointPinned, *, writer: Writer) -> bool:
    """Append the pin; return False when the checkpoint is not committed or the pin's attempt is not the latest."""

    def unless_too_late(state: RunState) -> CheckpointPinned | None:
        record = state.find_live(pin.prefix)
        is_late = pin.during_attempt not in (None, state.latest_attempt)
        return pin if record and record.is_committed and not is_late and not _is_in_force(pin, state) else None

    return _is_in_force(pin, log.append(unless_too_late, writer=writer))


def unpin_checkpoint(log: RunLog, pin: CheckpointPinned, why: str, *, writer: Writer) -> RunState:
    """Append that the pin is over, unless it is over already."""
    return log.append(partial(unpin_entry, pin, why), writer=writer)


def unpin_entry(pin: CheckpointPinned, why: str, state: RunState) -> run_entries.CheckpointUnpinned | None:
    """Return the entry that ends the pin, or None when it is over already."""
    unpinned = run_entries.CheckpointUnpinned(pin_id=pin.pin_id, prefix=pin.prefix, why=why)
    return unpinned if _is_in_force(pin, state) else None


def _is_in_force(pin: CheckpointPinned, state: RunState) -> bool:
    return any(other.pin_id == pin.pin_id for other in state.pins)


def _describe(evidence: tuple[ReadEvidence, ...]) -> str:
    return "; ".join(f"{item.key}: {item.found}, must be {item.expected}" for item in evidence)


def verified_beginning(log: RunLog, *, sleep: Callable[[float], None]) -> CheckpointReference | None:
    """Return what the run begins with, None for step 0; `NothingReadable` if a fork's parent has it no more."""
    state = log.state
    if state.origin is not None:
        trusted, policy = not state.is_doubted(state.origin.checkpoint), ReadPolicy(sleep=sleep)
        if evidence := collect_evidence(log, state.origin.checkpoint, (), policy=policy, sizes_only=trusted):
            begun = f"run {log.run_id} begins with step {state.origin.checkpoint.step} of run {state.origin.run_id}"
            found = f"which cannot be read: {_describe(evidence)}"
            left = "nothing is left to start over from" if state.commits else "there is nothing to begin with"
            raise NothingReadable(f"{begun}, {found}; {left}. {_ELSEWHERE}, or fork another step")
    return state.beginning


def open_fork(parent: RunLog, body: run_entries.RunOpened, pin: CheckpointPinned, *, writer: Writer) -> RunState:
    """Pin the beginning, then open the fork, and return its state, which another process may have opened.

    Raises `IntegrityError` when the checkpoint is not committed any more.
    """
    if not pin_checkpoint(parent, pin, writer=writer):
        raise IntegrityError(f"{pin.prefix} was given up meanwhile; fork another step")
    state = RunLog(parent.store, body.run_id).append(
        lambda state: body if state.opened is None and pin.pin_id not in state.abandoned_pins else None, writer=writer
    )
    if state.opened != body:
        unpin_checkpoint(parent, pin, "another process opened the run first", writer=writer)
    return state


def judge_fork_pin(store: ObjectStore, pin: CheckpointPinned, *, is_dead: bool, writer: Writer | None) -> Finding:
    """Return whether the pin is over; unless `writer` is None, its number is taken from a maker that `is_dead` first.

    A fork whose log cannot be read keeps its pin.
    """
    fork = RunLog(store, pin.fork or "")
    try:
        state = fork.refresh()
        if state.opened is None and is_dead and writer is not None:
            state = fork.append(partial(_abandoned, pin), writer=writer)
        is_over, why = _judge(pin, state, is_abandoned=is_dead)
    except (IntegrityError, WriterTooOld) as error:
        is_over, why = False, f"cannot be read: {error}"
    return Finding(key=pin.pin_id, is_over=is_over, why=f"run {pin.fork}, which was forked from it, {why}")


def begin_again(
    log: RunLog, pinned_by: run_entries.Placement, *, writer: Writer, sleep: Callable[[float], None]
) -> CheckpointReference | None:
    """Return what a run begins with again, None for step 0; the beginning of a fork is verified and pinned anew.

    Raises `NothingReadable` if the parent has it no more.
    """
    beginning, origin = verified_beginning(log, sleep=sleep), log.state.origin
    if origin is not None:
        pin = new_pin(origin.checkpoint, pinned_by, fork=log.run_id)
        if not pin_checkpoint(RunLog(log.store, origin.run_id), pin, writer=writer):
            gone = f"run {log.run_id} begins with step {pin.step} of run {origin.run_id}, which has given it up"
            raise NothingReadable(f"{gone}: nothing is left to start over from. Fork another step")
    return beginning


def _abandoned(pin: CheckpointPinned, state: RunState) -> run_entries.ForkAbandoned | None:
    if state.opened is not None or pin.pin_id in state.abandoned_pins:
        return None
    why = f"process {pin.pinned_by.pid} on {pin.pinned_by.host}, which pinned it, died before it opened this run"
    return run_entries.ForkAbandoned(pin_id=pin.pin_id, prefix=pin.prefix, why=why)


def _judge(pin: CheckpointPinned, state: RunState, *, is_abandoned: bool) -> tuple[bool, str]:
    if state.opened is None:
        return is_abandoned, "was never opened" if is_abandoned else "may still be opened"
    if state.origin is None or state.origin.checkpoint.manifest_sha256 != pin.manifest_sha256:
        return True, "was opened without it"
    if state.finished is not None or state.deleted is not None:
        return True, "needs it no more"
    config = state.attempts[-1].started.config if state.attempts else state.origin.config
    keep, own = codec.stored_value(config, "checkpoint", "keep_last", int) or 1, len(state.readable)
    return own >= keep, f"has {own} of the {keep} checkpoints of its own that it keeps"
