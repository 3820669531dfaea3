"""Failure traces for the simulation: rates per device and day, or what a run's receipts recorded and its rates.

A trace file is TOML or JSON with these keys and no others:

    source = "our cluster, last quarter"     # optional, shown to people
    [per_device_day]                          # reason = failures of one device in one day
    preempted = 2e-4
    lost = 5e-4

The built-in trace is table 5 of "The Llama 3 Herd of Models" (Meta, 2024, arXiv:2407.21783): 419 unexpected
interruptions of 16,384 GPUs in 54 days. The mapping of its causes to reasons is ours: unplanned host maintenance is
preempted, the collectives' watchdog is hung, corrupted data is diverged, a disk is storage, everything else is lost.
"""

import json
import random
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from storage.logs.run_state import AttemptRecord, RunState
from tasks.errors import TaskError
from tasks.policy.termination import DecisionAction, TerminationReason

DAY_SECONDS = 86_400.0
_NO_FAILURES = frozenset({TerminationReason.COMPLETED, TerminationReason.FENCED, TerminationReason.CANCELLED})
_PUBLISHED = {
    TerminationReason.LOST: 371,
    TerminationReason.PREEMPTED: 32,
    TerminationReason.HUNG: 7,
    TerminationReason.DIVERGED: 6,
    TerminationReason.STORAGE: 3,
}


class InvalidTrace(TaskError):
    """A failure trace breaks a rule; the message names the field and the rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFailure:
    """The failure of one attempt, `after_device_seconds` from its start; None and empty mean unknown."""

    reason: TerminationReason
    after_device_seconds: float
    detail: str = ""
    fingerprint: str = ""
    quarantined_samples: int | None = None
    repaired_objects: int = 0

    def __post_init__(self) -> None:
        if self.reason in _NO_FAILURES:
            raise InvalidTrace(f"reason {self.reason}: must be a failure")
        if not self.after_device_seconds >= 0:
            raise InvalidTrace(f"after_device_seconds {self.after_device_seconds}: must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureTrace:
    """Recorded failures in order, then drawn ones; `rates` are failures per device and day, by reason."""

    source: str
    rates: Mapping[TerminationReason, float]
    recorded: tuple[TraceFailure, ...] = ()

    def __post_init__(self) -> None:
        for reason, rate in self.rates.items():
            if reason in _NO_FAILURES:
                raise InvalidTrace(f"per_device_day.{reason}: must be a failure, not another way to end")
            if not 0 <= rate < float("inf"):
                raise InvalidTrace(f"per_device_day.{reason} = {rate}: must be finite, not negative")

    def failures(self, generator: random.Random) -> Iterator[TraceFailure]:
        """Yield the failure of each attempt; ends only if the rates are zero."""
        return chain(self.recorded, self.drawn(generator))

    def drawn(self, generator: random.Random) -> Iterator[TraceFailure]:
        """Yield failures by rates alone: exponential in device time, reasons in proportion to their rates."""
        reasons, ladder = tuple(self.rates), tuple(accumulate(self.rates.values()))
        if not ladder or ladder[-1] <= 0:
            return
        per_second = ladder[-1] / DAY_SECONDS
        while True:
            after = generator.expovariate(per_second)
            yield TraceFailure(reason=generator.choices(reasons, cum_weights=ladder)[0], after_device_seconds=after)

    def mean_device_seconds(self, *, without: frozenset[TerminationReason] = frozenset()) -> float:
        """Return the mean device time between failures by rates, except reasons in `without`; may be infinite."""
        per_day = sum(rate for reason, rate in self.rates.items() if reason not in without)
        return DAY_SECONDS / per_day if per_day > 0 else float("inf")


class _TraceFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = ""
    per_device_day: dict[TerminationReason, Annotated[float, Field(ge=0, allow_inf_nan=False)]]


def published_trace() -> FailureTrace:
    """Return the interruptions of Llama 3 405B as rates per device and day."""
    return FailureTrace(
        source="Llama 3 405B: 419 unexpected interruptions of 16,384 GPUs in 54 days (arXiv:2407.21783)",
        rates={reason: count / (16_384 * 54) for reason, count in _PUBLISHED.items()},
    )


def parse_trace(text: str, *, name: str) -> FailureTrace:
    """Return the trace in a TOML or JSON text; raises `InvalidTrace` with one line per broken rule."""
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        read = _TraceFile.model_validate(document)
    except ValidationError as error:
        broken = [f"{name}: {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise InvalidTrace("\n".join(broken)) from error
    except ValueError as error:  # both decoders' errors are ValueErrors
        raise InvalidTrace(f"{name}: neither TOML nor JSON: {error}") from error
    return FailureTrace(source=read.source or name, rates=read.per_device_day)


def recorded_trace(state: RunState, *, restart_device_seconds: float = 0.0) -> FailureTrace:
    """Return the failures in a run's receipts and their rates; completed, fenced and cancelled are not failures.

    Receipts count from the trainer's first step. In a simulation an attempt begins with its restart, so
    `restart_device_seconds` is added to every attempt except the first.
    """
    ended = [attempt for attempt in state.attempts if attempt.ended is not None]
    failed = [attempt for attempt in ended if _reason(attempt) not in _NO_FAILURES]
    exposed = (_device_seconds(attempt, restart_device_seconds) for attempt in state.attempts)
    device_days = sum(exposed) / DAY_SECONDS
    counts = Counter(_reason(attempt) for attempt in failed)
    run_id = state.opened.run_id if state.opened else ""
    return FailureTrace(
        source=f"run {run_id}: {len(failed)} failures in {device_days * 24:.3g} device hours",
        rates={reason: count / device_days for reason, count in sorted(counts.items()) if device_days},
        recorded=tuple(_recorded(state, attempt, restart_device_seconds) for attempt in failed),
    )


def _recorded(state: RunState, attempt: AttemptRecord, restart_device_seconds: float) -> TraceFailure:
    assert attempt.ended is not None
    ended, number = attempt.ended, attempt.started.attempt
    samples = sum(len(item.windows) for item in state.quarantines if item.attempt == number)
    remedied = ended.decision.action == DecisionAction.RESUME and not samples
    return TraceFailure(
        reason=_reason(attempt),
        after_device_seconds=_device_seconds(attempt, restart_device_seconds),
        detail=ended.detail,
        fingerprint=ended.fingerprint,
        quarantined_samples=samples,
        repaired_objects=int(remedied and _reason(attempt) is TerminationReason.BAD_DATA),
    )


def _device_seconds(attempt: AttemptRecord, restart_device_seconds: float) -> float:
    """Device time exposed to failures; for an open attempt, up to its last commit."""
    number = attempt.started.attempt
    used = attempt.ended.gpu_seconds if attempt.ended else attempt.committed_gpu_seconds
    return used + (restart_device_seconds if number > 1 else 0.0)


def _reason(attempt: AttemptRecord) -> TerminationReason:
    reason = attempt.ended.reason if attempt.ended else ""
    # A reason of a newer version is treated as one that is never retried.
    return TerminationReason(reason) if reason in set(TerminationReason) else TerminationReason.ERROR
