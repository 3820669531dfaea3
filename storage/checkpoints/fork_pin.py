"""The pin that keeps a fork's beginning in its parent's log: made before the fork is opened, ended on proof.

A process that dies between pin and opening may have sent the opening entry already. As for an alias, a sweep first
takes the number under which that entry would arrive, and only then ends the pin.
"""

from collections.abc import Callable
from functools import partial

from cairn.storage.checkpoints.resume_point import new_pin, pin_checkpoint, unpin_checkpoint, verified_beginning
from cairn.storage.checkpoints.sweep import Finding
from cairn.storage.errors import IntegrityError, NothingReadable, WriterTooOld
from cairn.storage.logs.log_entry import CheckpointReference, Writer
from cairn.storage.logs.run_entries import CheckpointPinned, ForkAbandoned, Placement, RunOpened
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.codec import stored_value
from cairn.storage.stores.object_store import ObjectStore


def open_fork(parent: RunLog, body: RunOpened, pin: CheckpointPinned, *, writer: Writer) -> RunState:
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
    log: RunLog, pinned_by: Placement, *, writer: Writer, sleep: Callable[[float], None]
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


def _abandoned(pin: CheckpointPinned, state: RunState) -> ForkAbandoned | None:
    if state.opened is not None or pin.pin_id in state.abandoned_pins:
        return None
    why = f"process {pin.pinned_by.pid} on {pin.pinned_by.host}, which pinned it, died before it opened this run"
    return ForkAbandoned(pin_id=pin.pin_id, prefix=pin.prefix, why=why)


def _judge(pin: CheckpointPinned, state: RunState, *, is_abandoned: bool) -> tuple[bool, str]:
    if state.opened is None:
        return is_abandoned, "was never opened" if is_abandoned else "may still be opened"
    if state.origin is None or state.origin.checkpoint.manifest_sha256 != pin.manifest_sha256:
        return True, "was opened without it"
    if state.finished is not None or state.deleted is not None:
        return True, "needs it no more"
    config = state.attempts[-1].started.config if state.attempts else state.origin.config
    keep, own = stored_value(config, "checkpoint", "keep_last", int) or 1, len(state.readable)
    return own >= keep, f"has {own} of the {keep} checkpoints of its own that it keeps"
