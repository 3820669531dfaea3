"""Holding a checkpoint: its bytes stay while somebody needs them, decided in the same sequence as superseding.

Owns taking and releasing. Refuses to know why anybody needs a checkpoint, and when a hold that nobody released is over:
`tasks.retention` decides that on proof.
"""

from functools import partial

from storage.log_entry import Writer
from storage.run_entries import CheckpointHeld, CheckpointReleased
from storage.run_log import RunLog
from storage.run_state import COMMITTED, RunState


def hold_checkpoint(log: RunLog, hold: CheckpointHeld, *, writer: Writer) -> bool:
    """Append the hold; False when the checkpoint is no longer committed or the attempt that asks is not the latest."""
    state = log.append(partial(_unless_too_late, hold), writer=writer)
    return any(held.hold_id == hold.hold_id for held in state.holds)


def release_checkpoint(log: RunLog, hold: CheckpointHeld, why: str, *, writer: Writer) -> RunState:
    """Append that the hold is over; one that is over already is left as it is."""
    released = CheckpointReleased(hold_id=hold.hold_id, prefix=hold.prefix, why=why)
    return log.append(partial(_unless_over, released), writer=writer)


def _unless_too_late(hold: CheckpointHeld, state: RunState) -> CheckpointHeld | None:
    record = state.find(hold.prefix)
    late = hold.during_attempt is not None and hold.during_attempt != state.latest_attempt
    taken = any(held.hold_id == hold.hold_id for held in state.holds)
    return None if record is None or record.state != COMMITTED or late or taken else hold


def _unless_over(released: CheckpointReleased, state: RunState) -> CheckpointReleased | None:
    return released if any(hold.hold_id == released.hold_id for hold in state.holds) else None
