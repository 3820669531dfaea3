"""The checkpoint that a start resumes from: the newest one that verifies, and no verdict on one look.

A start checks manifest and sizes and leaves the bytes to those who load them. Where an attempt could not load them,
they are read, again from the store and not from a cache. What fails every look is quarantined with the evidence, one
checkpoint a start, for the host that reads may be the sick one. What verifies later is taken back.
"""

import socket
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import partial

from storage.checkpoints.checkpoint import UNREADABLE, verify_checkpoint
from storage.checkpoints.checkpoint_shard import LOOKS
from storage.errors import IntegrityError, NothingReadable, ObjectDamaged
from storage.logs.log_entry import CheckpointReference, Writer
from storage.logs.run_entries import CheckpointCommitted, CheckpointQuarantined, CheckpointRestored, ReadEvidence
from storage.logs.run_log import RunLog
from storage.logs.run_state import CheckpointRecord, RunState
from storage.stores.local_store import forget_cached_bytes

_PAUSE_SECONDS = 0.5


def newest_verified(
    log: RunLog, *, writer: Writer, sleep: Callable[[float], None] = time.sleep, quarantines_at_most: int = 1
) -> CheckpointReference | None:
    """Return the newest checkpoint that verifies; without a commit that of another run for a fork, else None.

    Bytes are read only of a checkpoint that an attempt could not load, that may be restored, or that follows one that
    fails here. Those that fail are quarantined, a quarantined one that verifies is taken back. Raises
    `NothingReadable` if there were commits and none verifies (a person decides whether the run starts over), and
    `IntegrityError` when more would have to be quarantined than one host may say of a store at a time.
    """
    failed: list[CheckpointRecord] = []
    quarantined = 0
    while True:
        state = log.refresh()
        known = {record.committed.prefix for record in failed}
        record = next((item for item in state.candidates if item.committed.prefix not in known), None)
        if record is None:
            if state.commits:
                raise _nothing_readable(log.run_id, state)
            return _verified_beginning(log, state, sleep)
        reference, looks = record.committed.reference, LOOKS if record.is_committed else 1
        trusted = record.is_committed and not quarantined and not state.is_doubted(reference)
        evidence = look_again(log, reference, record.suspects, looks=looks, sizes_only=trusted, sleep=sleep)
        if not evidence:
            if not record.is_committed:
                log.append(partial(restored_entry, record.committed), writer=writer)
            return reference
        failed.append(record)
        if record.is_committed:
            if quarantined == quarantines_at_most:
                raise _suspect_reader(log.run_id, failed[-2:], evidence)
            quarantine_checkpoint(log, record.committed, _told(evidence), evidence=evidence, writer=writer)
            quarantined += 1


def look_again(
    log: RunLog,
    reference: CheckpointReference,
    suspects: tuple[str, ...] = (),
    *,
    looks: int = LOOKS,
    sizes_only: bool = False,
    sleep: Callable[[float], None],
) -> tuple[ReadEvidence, ...]:
    """Return the evidence against a checkpoint that failed every look, or none as soon as one look succeeds.

    The objects in `suspects` are read first. After a look that fails the log is read: where that fails too, the store
    is away and nothing is said of the checkpoint.
    """
    damaged: tuple[ObjectDamaged, ...] = ()
    for number in range(looks):
        if number:
            sleep(_PAUSE_SECONDS * 2**number)
        for path in filter(None, map(log.store.local_path, suspects)):
            forget_cached_bytes(path)
        damaged = verify_checkpoint(log.store, reference, only=suspects) if suspects else ()
        damaged = damaged or verify_checkpoint(log.store, reference, sizes_only=sizes_only)
        if not damaged:
            return ()
        suspects = tuple(item.key for item in damaged)
        log.refresh()
    host = socket.gethostname()
    return tuple(
        ReadEvidence(key=item.key, expected=item.expected, found=item.found, looks=looks, host=host) for item in damaged
    )


def quarantine_checkpoint(
    log: RunLog, committed: CheckpointCommitted, detail: str, *, evidence: tuple[ReadEvidence, ...] = (), writer: Writer
) -> RunState:
    """Append that no resume uses this checkpoint any more, and why, unless it is no longer committed."""
    body = CheckpointQuarantined(**asdict(committed.reference), detail=detail, evidence=evidence)

    def unless_unreadable(state: RunState) -> CheckpointQuarantined | None:
        return body if any(record.committed.prefix == body.prefix for record in state.readable) else None

    return log.append(unless_unreadable, writer=writer)


def restored_entry(committed: CheckpointCommitted, state: RunState) -> CheckpointRestored | None:
    """Return the entry that takes a checkpoint back, or None when it is not quarantined for its bytes any more."""
    record = state.find_live(committed.prefix)
    if record is None or not record.may_be_restored:
        return None
    return CheckpointRestored(
        **asdict(committed.reference), detail=f"every object verified on host {socket.gethostname()}"
    )


def fails_alike(fresh: Collection[ReadEvidence], before: Collection[ReadEvidence]) -> bool:
    """Whether fresh looks have failed in the same way: at the same object, and read or not read as it was then."""
    unreadable = {item.key: item.found.startswith(UNREADABLE) for item in before}
    return any(unreadable.get(item.key) is item.found.startswith(UNREADABLE) for item in fresh)


def _told(evidence: tuple[ReadEvidence, ...]) -> str:
    return "; ".join(f"{item.key}: {item.found}, must be {item.expected}" for item in evidence)


def _verified_beginning(log: RunLog, state: RunState, sleep: Callable[[float], None]) -> CheckpointReference | None:
    """Return what the run begins with; raises `NothingReadable` where that is a checkpoint that does not verify."""
    if state.origin is None:
        return state.beginning
    trusted = not state.is_doubted(state.origin.checkpoint)
    if evidence := look_again(log, state.origin.checkpoint, sizes_only=trusted, sleep=sleep):
        raise NothingReadable(
            f"run {log.run_id} begins with step {state.origin.checkpoint.step} of run {state.origin.run_id}, which "
            f"cannot be read: {_told(evidence)}. Start on another host, restore its objects, or fork another step"
        )
    return state.beginning


def _nothing_readable(run_id: str, state: RunState) -> NothingReadable:
    lost = state.checkpoints[-1]
    return NothingReadable(
        f"run {run_id} has committed {state.commits} checkpoints and none can be read; the newest, step "
        f"{lost.committed.step}, is {lost.state}: {lost.detail}. Start on another host, restore its objects, or start "
        "over at step 0 with `cairn train --start-over`"
    )


def _suspect_reader(run_id: str, failed: list[CheckpointRecord], evidence: tuple[ReadEvidence, ...]) -> IntegrityError:
    steps = " and ".join(str(record.committed.step) for record in failed)
    return IntegrityError(
        f"run {run_id}: the checkpoints of steps {steps} cannot be read here ({_told(evidence)}). Host "
        f"{evidence[0].host} or its way to the store may be what is sick, so only the first is quarantined: start "
        "on another host, which takes it back if it verifies there. Where they are damaged indeed, run the same "
        "command again; each start gives up one"
    )
