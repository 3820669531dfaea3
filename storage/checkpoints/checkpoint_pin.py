"""Pins that keep a checkpoint's bytes while an evaluation, an attempt or an alias needs them.

Pins and supersedes share the run log's sequence, so a pin that is committed cannot be too late.
"""

import uuid
from functools import partial

from storage.logs.log_entry import Writer
from storage.logs.run_entries import CheckpointHeld, CheckpointReference, CheckpointReleased, Placement
from storage.logs.run_log import RunLog
from storage.logs.run_state import COMMITTED, RunState


def new_pin(
    reference: CheckpointReference,
    holder: Placement,
    *,
    alias: str | None = None,
    suite_sha256: str | None = None,
    during_attempt: int | None = None,
) -> CheckpointHeld:
    """Return a hold with an id of its own, for an alias or for an evaluation; it counts once it is appended."""
    return CheckpointHeld(
        step=reference.step,
        attempt=reference.attempt,
        prefix=reference.prefix,
        manifest_sha256=reference.manifest_sha256,
        hold_id=uuid.uuid4().hex,
        holder=holder,
        alias=alias,
        suite_sha256=suite_sha256,
        during_attempt=during_attempt,
    )


def pin_checkpoint(log: RunLog, hold: CheckpointHeld, *, writer: Writer) -> bool:
    """Append the hold; False when the checkpoint is no longer committed or the attempt that asks is not the latest."""
    state = log.append(partial(_unless_too_late, hold), writer=writer)
    return any(held.hold_id == hold.hold_id for held in state.holds)


def unpin_checkpoint(log: RunLog, hold: CheckpointHeld, why: str, *, writer: Writer) -> RunState:
    """Append that the hold is over; one that is over already is left as it is."""
    return log.append(partial(unpin_entry, hold, why), writer=writer)


def unpin_entry(hold: CheckpointHeld, why: str, state: RunState) -> CheckpointReleased | None:
    """Decide the entry that ends the hold: None where it is over already."""
    if not any(held.hold_id == hold.hold_id for held in state.holds):
        return None
    return CheckpointReleased(hold_id=hold.hold_id, prefix=hold.prefix, why=why)


def _unless_too_late(hold: CheckpointHeld, state: RunState) -> CheckpointHeld | None:
    record = state.find(hold.prefix)
    late = hold.during_attempt is not None and hold.during_attempt != state.latest_attempt
    taken = any(held.hold_id == hold.hold_id for held in state.holds)
    return None if record is None or record.state != COMMITTED or late or taken else hold
