"""The kind of an error, by which it is known in another process; it is found where the exception is caught."""

import errno
from collections.abc import Mapping
from enum import StrEnum

from model.errors import BadBatch, LossExploded, NonFiniteLoss, TokenOutOfRange
from storage.errors import (
    AppendUnknown,
    Fenced,
    IntegrityError,
    NotDurable,
    ObjectMissing,
    SnapshotDamaged,
    StoreRefused,
    StoreUnavailable,
)


class ErrorKind(StrEnum):
    """The kinds of errors; `tasks.policy.failures` has a row for each."""

    REFUSED = "refused"
    UNAVAILABLE = "unavailable"
    NOT_DURABLE = "not-durable"
    MISSING = "missing"
    DAMAGED = "damaged"
    BAD_DATA = "bad-data"
    DIVERGED = "diverged"
    OUT_OF_MEMORY = "out-of-memory"
    DEVICE_LOST = "device-lost"
    FENCED = "fenced"
    BUG = "bug"


_BY_TYPE: Mapping[type[BaseException], ErrorKind] = {
    StoreRefused: ErrorKind.REFUSED,
    StoreUnavailable: ErrorKind.UNAVAILABLE,
    NotDurable: ErrorKind.NOT_DURABLE,
    AppendUnknown: ErrorKind.UNAVAILABLE,
    ObjectMissing: ErrorKind.MISSING,
    SnapshotDamaged: ErrorKind.BAD_DATA,
    IntegrityError: ErrorKind.DAMAGED,
    Fenced: ErrorKind.FENCED,
    BadBatch: ErrorKind.BAD_DATA,
    TokenOutOfRange: ErrorKind.BAD_DATA,
    NonFiniteLoss: ErrorKind.DIVERGED,
    LossExploded: ErrorKind.DIVERGED,
    MemoryError: ErrorKind.OUT_OF_MEMORY,
}
"""A subclass stands before its base."""
_BY_NUMBER = {
    errno.ENOMEM: ErrorKind.OUT_OF_MEMORY,
    errno.ENOSPC: ErrorKind.UNAVAILABLE,
    errno.EDQUOT: ErrorKind.UNAVAILABLE,
}
_BY_PHRASE = {
    "can't allocate memory": ErrorKind.OUT_OF_MEMORY,
    "Cannot allocate memory": ErrorKind.OUT_OF_MEMORY,
    "out of memory": ErrorKind.OUT_OF_MEMORY,
    "not enough memory: you tried to allocate": ErrorKind.OUT_OF_MEMORY,
    "ALLOC_FAILED": ErrorKind.OUT_OF_MEMORY,
    "std::bad_alloc": ErrorKind.OUT_OF_MEMORY,
    "MemoryError": ErrorKind.OUT_OF_MEMORY,
    "No space left on device": ErrorKind.UNAVAILABLE,
    "Disk quota exceeded": ErrorKind.UNAVAILABLE,
    "uncorrectable ECC error": ErrorKind.DEVICE_LOST,
    "fallen off the bus": ErrorKind.DEVICE_LOST,
    # Not ncclInvalidUsage and ncclInvalidArgument: no retry cures those.
    "ncclUnhandledCudaError": ErrorKind.DEVICE_LOST,
    "ncclSystemError": ErrorKind.DEVICE_LOST,
    "ncclInternalError": ErrorKind.DEVICE_LOST,
    "ncclRemoteError": ErrorKind.DEVICE_LOST,
}
"""What libraries say that have no type for it (torch raises RuntimeError), or that end the process themselves."""


def kind_of(error: BaseException) -> ErrorKind:
    """Return the kind of a caught exception; what is not known is a bug."""
    for known, kind in _BY_TYPE.items():
        if isinstance(error, known):
            return kind
    number = error.errno if isinstance(error, OSError) else None
    return _BY_NUMBER.get(number or 0) or kind_in(str(error)) or ErrorKind.BUG


def kind_in(text: str) -> ErrorKind | None:
    """Return the kind that a library's own words name, or None."""
    return next((kind for phrase, kind in _BY_PHRASE.items() if phrase in text), None)
