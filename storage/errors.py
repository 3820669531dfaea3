"""The errors of `storage`: one root, and a subclass wherever a caller acts differently."""

from collections.abc import Iterator
from contextlib import contextmanager


class StorageError(Exception):
    """Something durable could not be read, written or trusted."""


class ObjectMissing(StorageError):
    """No object has this key."""


class StoreUnavailable(StorageError):
    """The store did not answer cleanly: the operation may or may not have happened."""


class StoreRefused(StoreUnavailable):
    """The store refused the operation, nothing happened, and a retry cannot help: no such bucket, no permission."""


class StoreFull(StoreUnavailable):
    """The store has no room: a sweep may make some while the operation is retried, else a person does."""


class StoreUnsound(StorageError):
    """The store does not honour create-if-absent, so it cannot keep a run."""


class IntegrityError(StorageError):
    """Bytes, hashes or schema are not what they must be."""


class SnapshotDamaged(IntegrityError):
    """An object of a data snapshot does not match its manifest; it can be built again from its source."""


class ObjectDamaged(IntegrityError):
    """An object does not read as promised: what was expected and what was found, for the evidence."""

    def __init__(self, key: str, *, expected: str, found: str) -> None:
        super().__init__(f"{key}: {found}, must be {expected}")
        self.key, self.expected, self.found = key, expected, found


class WriterTooOld(StorageError):
    """A newer program has written to this log: this one may read it, but not append, supersede or delete."""


class NothingReadable(IntegrityError):
    """A run has committed checkpoints and none can be read; a person decides whether it starts over."""


class Fenced(StorageError):
    """A newer attempt owns the run, or this attempt was ended: stop and acknowledge nothing."""


class AppendUnknown(StorageError):
    """The outcome of an append could not be established: stop, acknowledge nothing, read the log again later."""


class NotDurable(AppendUnknown):
    """The object is visible, but may vanish in a power cut: its folder's fsync failed. No retry can prove otherwise."""


@contextmanager
def restated(
    caught: type[Exception] | tuple[type[Exception], ...], raised: type[Exception], where: str, *, rule: str = ""
) -> Iterator[None]:
    """Raise an error of the block as another one, whose message says where it was met and which rule holds there."""
    try:
        yield
    except caught as error:
        raise raised(f"{where}: {error}{'; rule: ' if rule else ''}{rule}") from error
