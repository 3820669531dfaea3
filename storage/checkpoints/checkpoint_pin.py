"""Pins that keep a checkpoint's bytes while an evaluation, an attempt, an alias or a fork needs them."""

import uuid
from dataclasses import asdict
from functools import partial

from storage.logs.log_entry import CheckpointReference, Writer
from storage.logs.run_entries import CheckpointPinned, CheckpointUnpinned, Placement
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState


def new_pin(
    reference: CheckpointReference,
    holder: Placement,
    *,
    alias: str | None = None,
    suite_sha256: str | None = None,
    during_attempt: int | None = None,
    fork: str | None = None,
) -> CheckpointPinned:
    """Return a pin with a new id, for an alias, an evaluation or a fork; it counts once it is appended."""
    return CheckpointPinned(
        **asdict(reference),
        hold_id=uuid.uuid4().hex,
        holder=holder,
        alias=alias,
        suite_sha256=suite_sha256,
        during_attempt=during_attempt,
        fork=fork,
    )


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


def unpin_entry(pin: CheckpointPinned, why: str, state: RunState) -> CheckpointUnpinned | None:
    """Return the entry that ends the pin, or None when it is over already."""
    return CheckpointUnpinned(hold_id=pin.hold_id, prefix=pin.prefix, why=why) if _is_in_force(pin, state) else None


def _is_in_force(pin: CheckpointPinned, state: RunState) -> bool:
    return any(other.hold_id == pin.hold_id for other in state.pins)
