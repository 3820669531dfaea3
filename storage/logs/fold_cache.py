"""A cache of a run's folded state at one entry, so that readers need not start at the first entry.

It is ignored when its version, its bytes, its entry or that entry's `resume` field do not match; it can be deleted at
any time.
"""

from dataclasses import dataclass

from storage.errors import IntegrityError, ObjectMissing
from storage.logs.entry_log import EntryLog, ReadEntry
from storage.logs.run_state import RunState
from storage.stores.document import decode, encode, sha256
from storage.stores.object_store import ObjectStore

FOLD_VERSION = 2
FOLD_EVERY_ENTRIES = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedLog:
    """The state of a run after the entry `head`."""

    head: ReadEntry
    state: RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class _Label:
    version: int
    seq: int
    entry_sha256: str
    state_sha256: str


def write_fold(store: ObjectStore, key: str, folded: FoldedLog) -> None:
    """Write the cache: a label in one line, then the state."""
    state = encode(folded.state)
    label = _Label(
        version=FOLD_VERSION,
        seq=folded.head.entry.seq,
        entry_sha256=folded.head.sha256,
        state_sha256=sha256(state),
    )
    store.write(key, encode(label).replace(b"\n", b"") + b"\n" + state)


def read_fold(store: ObjectStore, key: str, log: EntryLog) -> FoldedLog | None:
    """Return the cached state, or None if there is none or it does not match.

    Raises `IntegrityError` if the log ends before the cached entry: entries were deleted.
    """
    try:
        line, _, state_bytes = store.read(key).partition(b"\n")
        label = decode(line, _Label, where=key)
        if label.version != FOLD_VERSION or sha256(state_bytes) != label.state_sha256:
            return None
        state = decode(state_bytes, RunState, where=key)
    except (ObjectMissing, IntegrityError):
        return None
    head = log.read(label.seq)
    if head is None:
        raise IntegrityError(
            f"{log.prefix}: ends before seq {label.seq}, which {key} was folded from: entries were deleted; restore "
            f"them, or delete {key} to accept the loss"
        )
    trusted = head.sha256 == label.entry_sha256 and head.entry.resume == state.resume
    return FoldedLog(head=head, state=state) if trusted else None
