"""Why an attempt ended: from evidence to one termination reason. Pure.

Owns the table of ARCHITECTURE section 5 as code. Refuses to gather evidence and to decide what follows.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum

PREEMPTED_EXIT_CODE = 75
ORPHANED_EXIT_CODE = 76
"""The trainer's own exit when its parent is gone."""


class TerminationReason(StrEnum):
    """Every way an attempt can end."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    LOST = "lost"
    OOM = "oom"
    BAD_DATA = "bad-data"
    DIVERGED = "diverged"
    STORAGE = "storage"
    HUNG = "hung"
    FENCED = "fenced"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class LastWords:
    """What a dying child said: the exception's type, its message and the traceback's lines."""

    exception: str
    message: str
    traceback: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Everything known about an end; None and empty mean not known."""

    exit_code: int | None = None
    last_words: LastWords | None = None
    finished: bool = False
    stop_signal: str | None = None
    fenced: str | None = None
    store_error: str | None = None
    stderr_tail: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A classified end: reason, a sentence for people, and a fingerprint that equal causes share."""

    reason: TerminationReason
    detail: str
    fingerprint: str


_BY_EXCEPTION = {
    "OutOfMemoryError": TerminationReason.OOM,
    "MemoryError": TerminationReason.OOM,
    "NonFiniteLoss": TerminationReason.DIVERGED,
    "TokenOutOfRange": TerminationReason.BAD_DATA,
    "StoreUnavailable": TerminationReason.STORAGE,
    "AppendUnknown": TerminationReason.STORAGE,
    "Fenced": TerminationReason.FENCED,
}
_ALLOCATOR_PHRASES = ("can't allocate memory", "CUDA out of memory", "not enough memory: you tried to allocate")


def classify(evidence: Evidence) -> Failure:
    """Return the one reason the evidence supports; stronger evidence is asked first."""
    if evidence.finished:
        return _failure(TerminationReason.COMPLETED, "the last step is committed", "")
    if evidence.fenced is not None:
        return _failure(TerminationReason.FENCED, evidence.fenced, "")
    if evidence.stop_signal == "SIGINT":
        return _failure(TerminationReason.CANCELLED, "a person interrupted it", "")
    if evidence.stop_signal is not None:
        return _failure(TerminationReason.PREEMPTED, f"{evidence.stop_signal} announced the end of this machine", "")
    if evidence.last_words is not None:
        return _from_words(evidence.last_words)
    if evidence.store_error is not None:
        return _failure(TerminationReason.STORAGE, evidence.store_error, "")
    return _from_exit(evidence)


def _from_words(words: LastWords) -> Failure:
    reason = _BY_EXCEPTION.get(words.exception, TerminationReason.ERROR)
    if reason is TerminationReason.ERROR and any(phrase in words.message for phrase in _ALLOCATOR_PHRASES):
        reason = TerminationReason.OOM
    origin = next((line.strip() for line in reversed(words.traceback) if line.lstrip().startswith("File ")), "")
    return _failure(reason, f"{words.exception}: {words.message}", f"{words.exception} {origin}")


def _from_exit(evidence: Evidence) -> Failure:
    code = evidence.exit_code
    if code is not None and code < 0:
        return _failure(
            TerminationReason.LOST,
            f"the trainer was killed by signal {-code} and left no other evidence",
            f"signal {-code}",
        )
    if code == ORPHANED_EXIT_CODE or code is None:
        return _failure(TerminationReason.LOST, "process or host vanished without other evidence", "vanished")
    tail = evidence.stderr_tail[-1] if evidence.stderr_tail else "nothing on stderr"
    return _failure(TerminationReason.ERROR, f"the trainer exited with {code}: {tail}", f"exit {code} {tail}")


def _failure(reason: TerminationReason, detail: str, cause: str) -> Failure:
    return Failure(
        reason=reason, detail=detail, fingerprint=hashlib.sha256(f"{reason}\n{cause}".encode()).hexdigest()[:12]
    )
