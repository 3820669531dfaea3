"""Why an attempt ended: from evidence to one termination reason. Pure.

Owns the table of ARCHITECTURE section 5 as code. Refuses to gather evidence and to decide what follows.
"""

import hashlib
import signal
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
    step: int | None = None
    windows: tuple[int, ...] = ()
    spike_step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Everything known about an end; None and empty mean not known.

    `exit_code` is negative for a signal's number. `stop_signal` is the first notice to leave, `notice` who gave it and
    how; `grace_ended` says that the trainer was killed because the grace period was over. `silent_seconds` is how long
    it had shown no sign of life when the watchdog killed it, `allowed_seconds` what its own history allowed.
    """

    exit_code: int | None = None
    last_words: LastWords | None = None
    finished: bool = False
    stop_signal: str | None = None
    notice: str = ""
    grace_ended: bool = False
    cancelling: bool = False
    fenced: str | None = None
    store_error: str | None = None
    silent_seconds: float | None = None
    allowed_seconds: float | None = None
    oom_kills: int = 0
    rss_bytes: int | None = None
    memory_limit_bytes: int | None = None
    kubernetes_reason: str = ""
    heartbeat_step: int | None = None
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
    "BadBatch": TerminationReason.BAD_DATA,
    "TokenOutOfRange": TerminationReason.BAD_DATA,
    "SnapshotDamaged": TerminationReason.BAD_DATA,
    "NonFiniteLoss": TerminationReason.DIVERGED,
    "LossExploded": TerminationReason.DIVERGED,
    "StoreUnavailable": TerminationReason.STORAGE,
    "AppendUnknown": TerminationReason.STORAGE,
    "Fenced": TerminationReason.FENCED,
}
_ALLOCATOR_PHRASES = ("can't allocate memory", "CUDA out of memory", "not enough memory: you tried to allocate")
_NO_SPACE_PHRASES = ("No space left on device", "Disk quota exceeded")
_KUBERNETES = {
    "OOMKilled": TerminationReason.OOM,
    "Evicted": TerminationReason.PREEMPTED,
    "Preempting": TerminationReason.PREEMPTED,
    "NodeShutdown": TerminationReason.PREEMPTED,
    "DeadlineExceeded": TerminationReason.PREEMPTED,
}
_FULL = 0.95
"""A killed process that used this much of its limit was killed for it, even where the kernel does not count."""


def classify(evidence: Evidence) -> Failure:
    """Return the one reason the evidence supports; stronger evidence is asked first."""
    if evidence.finished:
        return _failure(TerminationReason.COMPLETED, "the last step is committed", "")
    if evidence.fenced is not None:
        return _failure(TerminationReason.FENCED, evidence.fenced, "")
    if evidence.cancelling:
        return _failure(TerminationReason.CANCELLED, "a person cancelled it in Prefect", "")
    if evidence.stop_signal == "SIGINT":
        return _failure(TerminationReason.CANCELLED, "a person interrupted it", "")
    if evidence.stop_signal is not None:
        return _failure(TerminationReason.PREEMPTED, _preemption(evidence), "")
    if evidence.silent_seconds is not None:
        return _hung(evidence)
    if evidence.last_words is not None:
        return _from_words(evidence.last_words)
    if evidence.store_error is not None:
        return _failure(TerminationReason.STORAGE, evidence.store_error, "")
    return _from_exit(evidence)


def _preemption(evidence: Evidence) -> str:
    who = evidence.notice or f"{evidence.stop_signal} announced the end of this machine"
    if not evidence.grace_ended:
        return who
    return f"{who}; the grace period was too short to commit the step it had reached, so that is done again"


def _hung(evidence: Evidence) -> Failure:
    silent, allowed = evidence.silent_seconds or 0.0, evidence.allowed_seconds or 0.0
    detail = f"no sign of life for {silent:.0f} s; its own steps allowed {allowed:.0f} s"
    return _failure(TerminationReason.HUNG, detail, f"hung after step {evidence.heartbeat_step}")


def _from_words(words: LastWords) -> Failure:
    reason = _BY_EXCEPTION.get(words.exception, TerminationReason.ERROR)
    if reason is TerminationReason.ERROR and any(phrase in words.message for phrase in _ALLOCATOR_PHRASES):
        reason = TerminationReason.OOM
    if reason is TerminationReason.ERROR and any(phrase in words.message for phrase in _NO_SPACE_PHRASES):
        reason = TerminationReason.STORAGE
    origin = next((line.strip() for line in reversed(words.traceback) if line.lstrip().startswith("File ")), "")
    return _failure(reason, f"{words.exception}: {words.message}", f"{words.exception} {origin}")


def _from_exit(evidence: Evidence) -> Failure:
    if evidence.kubernetes_reason in _KUBERNETES:
        reason, told = _KUBERNETES[evidence.kubernetes_reason], evidence.kubernetes_reason
        return _failure(reason, f"Kubernetes ended the container: {told}", told)
    code = evidence.exit_code
    if evidence.oom_kills > 0:
        detail = (
            f"the kernel killed {evidence.oom_kills} process(es) of this control group for memory{_memory(evidence)}"
        )
        return _failure(TerminationReason.OOM, detail, "oom_kill")
    if code == -signal.SIGKILL and _is_full(evidence):
        return _failure(TerminationReason.OOM, f"killed by SIGKILL{_memory(evidence)}", "killed at its memory limit")
    if code == -signal.SIGKILL:
        detail = f"the trainer was killed by SIGKILL and left no other evidence{_memory(evidence)}"
        return _failure(TerminationReason.LOST, detail, "signal 9")
    if code == ORPHANED_EXIT_CODE or code is None:
        return _failure(TerminationReason.LOST, "process or host vanished without other evidence", "vanished")
    tail = evidence.stderr_tail[-1] if evidence.stderr_tail else "nothing on stderr"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return _failure(TerminationReason.ERROR, f"the trainer was killed by {name}: {tail}", f"{name} {tail}")
    return _failure(TerminationReason.ERROR, f"the trainer exited with {code}: {tail}", f"exit {code} {tail}")


def _is_full(evidence: Evidence) -> bool:
    used, limit = evidence.rss_bytes, evidence.memory_limit_bytes
    return used is not None and limit is not None and used >= _FULL * limit


def _memory(evidence: Evidence) -> str:
    if evidence.rss_bytes is None:
        return ""
    limit = f" of {evidence.memory_limit_bytes / 1e9:.2f} GB" if evidence.memory_limit_bytes else ""
    return f"; it last used {evidence.rss_bytes / 1e9:.2f} GB{limit}"


def _failure(reason: TerminationReason, detail: str, cause: str) -> Failure:
    return Failure(
        reason=reason, detail=detail, fingerprint=hashlib.sha256(f"{reason}\n{cause}".encode()).hexdigest()[:12]
    )
