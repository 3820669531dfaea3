"""The kind of an error where it is caught, and the classification of an attempt's end from its evidence."""

import errno
import re
import signal
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from cairn.model.errors import BadBatch, LossExploded, NonFiniteLoss, TokenOutOfRange
from cairn.storage import errors
from cairn.storage.stores.codec import sha256
from cairn.tasks.policy.termination import ExitCode, TerminationReason
from cairn.tasks.text.format import format_quantity

ORPHANED_EXIT_CODE = 76
"""Exit code of a trainer whose parent has died."""
PEER_LOST_EXIT_CODE = 77
"""Exit code of a rank that failed only because a peer died; the peer's error is the reason."""
OUTLIVED_EXIT_CODE = 78
"""Exit code of a machine's launcher when the ranks of the others go on without any of its own."""


class ErrorKind(StrEnum):
    """The kind of an error, by which it is known in another process."""

    REFUSED = "refused"
    FULL = "full"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ExceptionReport:
    """The exception that ended a trainer, its last event and in the receipt; for bad data with its step and windows."""

    kind: ErrorKind
    exception: str
    message: str
    traceback: tuple[str, ...]
    step: int | None = None
    windows: tuple[int, ...] = ()
    spike_step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Everything known about an end; None and empty mean unknown.

    `exit_code` is negative for a signal's number. `stop_signal` names the first shutdown request and `notice` describes
    it; `grace_ended` means that the trainer was killed after the grace period. `silent_seconds` is the heartbeat gap at
    which the watchdog killed it, `allowed_seconds` the gap that its history allowed. `lost_machine` says which other
    machine failed, and how; `lost_host` is its name, `too_few_machines` how many came in time. `paused`
    is why its set trains it no further now, `too_dear` why `cost.limit` lets it train no further. `store_error` is an
    error of the parent's own. `injected` are the faults that were injected into the attempt.
    """

    exit_code: int | None = None
    last_words: ExceptionReport | None = None
    finished: bool = False
    stopped_early: str = ""
    stop_signal: str | None = None
    notice: str = ""
    grace_ended: bool = False
    cancelling: bool = False
    cancelled_in: str = "Prefect"
    fenced: str | None = None
    store_error: str | None = None
    store_error_kind: ErrorKind | None = None
    silent_seconds: float | None = None
    allowed_seconds: float | None = None
    lost_machine: str = ""
    lost_host: str = ""
    too_few_machines: str = ""
    paused: str = ""
    too_dear: str = ""
    oom_kills: int = 0
    rss_bytes: int | None = None
    memory_limit_bytes: int | None = None
    kubernetes_reason: str = ""
    heartbeat_step: int | None = None
    stderr_tail: tuple[str, ...] = ()
    injected: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A classified end: reason, a sentence, a fingerprint that is equal for equal causes, and the kind of an error."""

    reason: TerminationReason
    detail: str
    fingerprint: str
    kind: ErrorKind | None = None


_BY_TYPE: Mapping[type[BaseException] | tuple[type[BaseException], ...], ErrorKind] = {
    errors.StoreRefused: ErrorKind.REFUSED,
    errors.StoreFull: ErrorKind.FULL,
    errors.NotDurable: ErrorKind.NOT_DURABLE,
    (errors.StoreUnavailable, errors.AppendUnknown): ErrorKind.UNAVAILABLE,
    errors.ObjectMissing: ErrorKind.MISSING,
    (errors.SnapshotDamaged, BadBatch, TokenOutOfRange): ErrorKind.BAD_DATA,
    errors.IntegrityError: ErrorKind.DAMAGED,
    errors.Fenced: ErrorKind.FENCED,
    (NonFiniteLoss, LossExploded): ErrorKind.DIVERGED,
    MemoryError: ErrorKind.OUT_OF_MEMORY,
}
"""A subclass stands before its base."""
_BY_ERRNO = {errno.ENOMEM: ErrorKind.OUT_OF_MEMORY} | dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ErrorKind.UNAVAILABLE)
_PHRASES = {
    ErrorKind.OUT_OF_MEMORY: (
        *("can't allocate memory", "Cannot allocate memory", "out of memory", "ALLOC_FAILED", "MemoryError"),
        *("not enough memory: you tried to allocate", "std::bad_alloc"),
    ),
    ErrorKind.UNAVAILABLE: ("No space left on device", "Disk quota exceeded"),
    ErrorKind.DEVICE_LOST: (
        *("uncorrectable ECC error", "fallen off the bus"),
        # Not ncclInvalidUsage and ncclInvalidArgument: no retry cures those.
        *("ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError", "ncclRemoteError"),
    ),
}
"""Messages of libraries that have no type for it (torch raises RuntimeError), or that end the process themselves."""
_BY_KIND = {
    **dict.fromkeys(ErrorKind, TerminationReason.STORAGE),  # all that have no line of their own
    ErrorKind.BAD_DATA: TerminationReason.BAD_DATA,
    ErrorKind.DIVERGED: TerminationReason.DIVERGED,
    ErrorKind.OUT_OF_MEMORY: TerminationReason.OOM,
    ErrorKind.DEVICE_LOST: TerminationReason.LOST,
    ErrorKind.FENCED: TerminationReason.FENCED,
    ErrorKind.BUG: TerminationReason.ERROR,
}
WAITS_FOR_A_PERSON = frozenset({ErrorKind.REFUSED, ErrorKind.FULL, ErrorKind.NOT_DURABLE})
"""Kinds that no retry cures: no permission, expired credentials, a disk that is full or keeps nothing."""
_FOLDERS = re.compile(r'(?<=File ").*[/\\]')
_RANDOM_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d{3,}")
"""Addresses, ports and process ids, which differ although the cause is the same."""
_KUBERNETES = {
    "OOMKilled": TerminationReason.OOM,
    **dict.fromkeys(("Evicted", "Preempting", "NodeShutdown", "DeadlineExceeded"), TerminationReason.PREEMPTED),
    # Of the pod's condition DisruptionTarget.
    **dict.fromkeys(("PreemptionByScheduler", "DeletionByTaintManager"), TerminationReason.PREEMPTED),
    **dict.fromkeys(("EvictionByEvictionAPI", "TerminationByKubelet", "DeletionByPodGC"), TerminationReason.PREEMPTED),
}
_BY_EXIT = {
    ExitCode.PREEMPTED: (TerminationReason.PREEMPTED, "the trainer exited with the exit code of a preemption"),
    -signal.SIGTERM: (TerminationReason.PREEMPTED, "the trainer was ended by SIGTERM before it could stop cleanly"),
    -signal.SIGINT: (TerminationReason.CANCELLED, "a person interrupted the trainer itself"),
    ORPHANED_EXIT_CODE: (TerminationReason.LOST, "the trainer found that its parent had died"),
    PEER_LOST_EXIT_CODE: (TerminationReason.LOST, "a rank of the trainer vanished on another machine"),
}
_SHELL_SIGNAL = 128
"""A shell or a container reports a signal as 128 + its number."""
_FULL = 0.95
"""A killed process that used this share of its limit was killed for memory, even if the kernel counts no kill."""


def kind_of(error: BaseException) -> ErrorKind:
    """Return the kind of a caught exception; what is not known is a bug."""
    by_type = next((kind for known, kind in _BY_TYPE.items() if isinstance(error, known)), None)
    number = error.errno if isinstance(error, OSError) else None
    return by_type or _BY_ERRNO.get(number or 0) or _kind_in(str(error)) or ErrorKind.BUG


def describe_exception(error: BaseException, kind: ErrorKind | None = None) -> ExceptionReport:
    """Return the report on a caught exception, whose kind is `kind_of` it unless another is given."""
    return ExceptionReport(
        kind=kind or kind_of(error),
        exception=type(error).__name__,
        message=str(error),
        traceback=tuple(traceback.format_exception(error)),
        step=getattr(error, "step", None),
        windows=tuple(getattr(error, "windows", ())),
        spike_step=getattr(error, "spike_step", None),
    )


def _kind_in(text: str) -> ErrorKind | None:
    """Return the kind that a library's own words name, or None."""
    return next((kind for kind, phrases in _PHRASES.items() if any(phrase in text for phrase in phrases)), None)


def classify(evidence: Evidence) -> Failure:
    """Return the one reason that the evidence supports, the strongest first; its detail names injected faults."""
    failure = _classify(evidence)
    is_injected = evidence.injected and failure.reason is not TerminationReason.COMPLETED
    return replace(failure, detail=as_injected(failure.detail, *evidence.injected)) if is_injected else failure


def as_injected(detail: str, *faults: str) -> str:
    """Return the detail of a failure with the injected faults that caused it."""
    return f"injected ({', '.join(faults)}): {detail}"


def _classify(evidence: Evidence) -> Failure:
    if evidence.finished:
        return _failure(TerminationReason.COMPLETED, evidence.stopped_early or "the last step is committed", "")
    if evidence.fenced is not None:
        return _failure(TerminationReason.FENCED, evidence.fenced, "")
    if evidence.cancelling:
        return _failure(TerminationReason.CANCELLED, f"a person cancelled it in {evidence.cancelled_in}", "")
    if evidence.stop_signal == "SIGINT":
        return _failure(TerminationReason.CANCELLED, "a person interrupted it", "")
    if evidence.stop_signal is not None:
        notice = evidence.notice or f"{evidence.stop_signal} announced the end of this machine"
        lost = "; the grace period was too short to commit the reached step, which is trained again"
        return _failure(TerminationReason.PREEMPTED, notice + (lost if evidence.grace_ended else ""), "")
    if evidence.too_few_machines:
        return _failure(TerminationReason.TOO_FEW_MACHINES, evidence.too_few_machines, "")
    if why := evidence.too_dear or evidence.paused:
        return _failure(TerminationReason.PAUSED, why, "")
    if evidence.silent_seconds is not None:
        silent, allowed = evidence.silent_seconds, evidence.allowed_seconds or 0.0
        detail = f"no sign of life for {silent:.0f} s; its own steps allowed {allowed:.0f} s"
        return _failure(TerminationReason.HUNG, detail, f"hung after step {evidence.heartbeat_step}")
    # A store error that no retry cures precedes its trainer's exception.
    if (report := evidence.last_words) is not None and evidence.store_error_kind not in WAITS_FOR_A_PERSON:
        origin = next((line.strip() for line in reversed(report.traceback) if line.lstrip().startswith("File ")), "")
        # Independent of the installation folder; other samples are another cause.
        chain = [line.partition(":")[0] for line in report.traceback if not line.startswith((" ", "\n", "Traceback"))]
        cause = f"{report.exception} {chain} {_FOLDERS.sub('', origin)} {sorted(report.windows)}"
        detail = f"{report.exception}: {report.message}" if report.message else report.exception
        return _failure(_BY_KIND[report.kind], detail, cause, report.kind)
    if evidence.store_error is not None:
        kind = evidence.store_error_kind or ErrorKind.UNAVAILABLE
        return _failure(_BY_KIND[kind], evidence.store_error, "", kind)
    return _from_exit(evidence)


def _from_exit(evidence: Evidence) -> Failure:
    if (word := evidence.kubernetes_reason) in _KUBERNETES:
        return _failure(_KUBERNETES[word], f"Kubernetes ended the container: {word}", word)
    code, used, limit = evidence.exit_code, evidence.rss_bytes, evidence.memory_limit_bytes
    of_limit = f" of {format_quantity(limit)}" if limit else ""
    memory = "" if used is None else f"; it used up to {format_quantity(used)}{of_limit}"
    if code is not None and code - _SHELL_SIGNAL in set(signal.Signals):
        code = _SHELL_SIGNAL - code
    # The group's count also grows when other processes in it are killed, so other signals are not memory kills.
    if evidence.oom_kills > 0 and (code is None or code > 0 or code == -signal.SIGKILL):
        detail = f"the kernel killed {evidence.oom_kills} process(es) of this control group for memory{memory}"
        return _failure(TerminationReason.OOM, detail, "oom_kill")
    if evidence.lost_machine and code in (-signal.SIGKILL, PEER_LOST_EXIT_CODE):
        return _failure(TerminationReason.LOST, evidence.lost_machine, "machine")
    if code == -signal.SIGKILL:
        if used is not None and limit is not None and used >= _FULL * limit:
            return _failure(TerminationReason.OOM, f"killed by SIGKILL{memory}", "killed at its memory limit")
        detail = f"the trainer was killed by SIGKILL and left no other evidence{memory}"
        return _failure(TerminationReason.LOST, detail, "signal 9")
    if code is None:
        return _failure(TerminationReason.LOST, "process or host vanished without other evidence", "vanished")
    if code in _BY_EXIT:
        reason, detail = _BY_EXIT[code]
        return _failure(reason, detail, str(code))
    tail = evidence.stderr_tail[-1] if evidence.stderr_tail else "nothing on stderr"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    how = f"was killed by {name}" if code < 0 else f"exited with {code}"
    # An abort prints its cause before the stack trace; otherwise only the last lines belong to the exit.
    lines = evidence.stderr_tail if code == -signal.SIGABRT else evidence.stderr_tail[-3:]
    kind = next(filter(None, map(_kind_in, lines)), ErrorKind.BUG)
    return _failure(_BY_KIND[kind], f"the trainer {how}: {tail}", _RANDOM_NUMBERS.sub("#", f"{code} {tail}"), kind)


def _failure(reason: TerminationReason, detail: str, cause: str, kind: ErrorKind | None = None) -> Failure:
    return Failure(reason=reason, detail=detail, fingerprint=sha256(f"{reason}\n{cause}".encode())[:12], kind=kind)
