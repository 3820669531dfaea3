"""Holding a checkpoint: its bytes stay while somebody needs them, decided in the same sequence as superseding.

Owns taking and releasing. Refuses to know why anybody needs a checkpoint, and when a hold that nobody released is over:
`tasks.policy.retention` decides that on proof.
"""

import uuid
from functools import partial

from storage.logs.log_entry import Writer
from storage.logs.run_entries import CheckpointHeld, CheckpointReference, CheckpointReleased, Placement
from storage.logs.run_log import RunLog
from storage.logs.run_state import COMMITTED, RunState


def new_hold(
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


def hold_checkpoint(log: RunLog, hold: CheckpointHeld, *, writer: Writer) -> bool:
    """Append the hold; False when the checkpoint is no longer committed or the attempt that asks is not the latest."""
    state = log.append(partial(_unless_too_late, hold), writer=writer)
    return any(held.hold_id == hold.hold_id for held in state.holds)


def release_checkpoint(log: RunLog, hold: CheckpointHeld, why: str, *, writer: Writer) -> RunState:
    """Append that the hold is over; one that is over already is left as it is."""
    return log.append(partial(releasing, hold, why), writer=writer)


def releasing(hold: CheckpointHeld, why: str, state: RunState) -> CheckpointReleased | None:
    """Decide the entry that ends the hold: None where it is over already."""
    if not any(held.hold_id == hold.hold_id for held in state.holds):
        return None
    return CheckpointReleased(hold_id=hold.hold_id, prefix=hold.prefix, why=why)


def _unless_too_late(hold: CheckpointHeld, state: RunState) -> CheckpointHeld | None:
    record = state.find(hold.prefix)
    late = hold.during_attempt is not None and hold.during_attempt != state.latest_attempt
    taken = any(held.hold_id == hold.hold_id for held in state.holds)
    return None if record is None or record.state != COMMITTED or late or taken else hold
