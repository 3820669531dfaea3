"""Failure traces for the simulation: rates per device and day, or what a run's receipts recorded and its rates.

A trace file is TOML or JSON with these keys and no others:

    source = "our cluster, last quarter"     # optional, shown to people
    replacement_seconds = 900                 # optional, mean wait for another machine after preempted and lost
    [aftershocks]                             # optional: failures that come together, such as a rack's
    share = 0.3                               # of the failures, so many have another one soon after them
    rate_factor = 20                          # which comes so many times as fast as the first of them
    [per_device_day]                          # reason = failures of one device in one day, aftershocks included
    preempted = 2e-4
    lost = 5e-4
    [offers.spot]                             # optional: machines to choose from, each with the keys above and a price
    price_per_device_hour = 1.2
    per_device_day = { preempted = 0.3 }

The built-in trace is table 5 of "The Llama 3 Herd of Models" (Meta, 2024, arXiv:2407.21783): 419 unexpected
interruptions of 16,384 GPUs in 54 days. The mapping of its causes to reasons is ours: unplanned host maintenance is
preempted, the collectives' watchdog is hung, corrupted data is diverged, a disk is storage, everything else is lost.
"""

import json
import random
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, chain
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from cairn.storage.logs.run_state import AttemptRecord, RunState
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.policy.termination import DecisionAction, TerminationReason

DAY_SECONDS = 86_400.0
_NO_FAILURES = {TerminationReason.COMPLETED, TerminationReason.FENCED}
_NO_FAILURES |= {TerminationReason.CANCELLED, TerminationReason.PAUSED}
_TAKES_MACHINE = frozenset({TerminationReason.PREEMPTED, TerminationReason.LOST})
_PUBLISHED = {
    TerminationReason.LOST: 371,
    TerminationReason.PREEMPTED: 32,
    TerminationReason.HUNG: 7,
    TerminationReason.DIVERGED: 6,
    TerminationReason.STORAGE: 3,
}
_STRICT = ConfigDict(extra="forbid")
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Rate = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
_RULES = {
    "missing": "missing; `cairn simulate --help` shows the keys of a trace",
    "unexpected": "unknown key; leave it out",
    "finite": "must be a finite number",
    "float": "must be a number",
    "int": "must be a whole number",
    "string": "must be a text",
    "enum": "must be one of " + ", ".join(reason for reason in TerminationReason if reason not in _NO_FAILURES),
}
"""Rules by the first word of pydantic's name of an error; a value of any other must be a table."""


def _is_failure(reason: TerminationReason) -> TerminationReason:
    if reason in _NO_FAILURES:
        raise ValueError(f"{reason} is no failure, but another way to end")
    return reason


FailureReason = Annotated[TerminationReason, AfterValidator(_is_failure)]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TraceFailure:
    """The failure of one attempt, `after_device_seconds` from its start; None and empty mean unknown.

    The next attempt waits `replacement_seconds` for another machine.
    """

    reason: FailureReason
    after_device_seconds: NotNegative
    detail: str = ""
    fingerprint: str = ""
    quarantined_samples: int | None = None
    repaired_objects: int = 0
    replacement_seconds: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Aftershocks:
    """Failures that come together: a `share` of all has another after it, `rate_factor` times as fast as others."""

    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rate_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class FailureTrace:
    """Recorded failures in order, then drawn ones by their rates: failures per device and day, by reason.

    `replacement_seconds` is the mean wait for another machine after a failure that took one. `offers` are machines to
    choose from, each with failures and a price of its own.
    """

    source: str = ""
    per_device_day: dict[FailureReason, _Rate]
    recorded: tuple[TraceFailure, ...] = ()
    replacement_seconds: NotNegative = 0.0
    aftershocks: Aftershocks = Aftershocks()
    price_per_device_hour: NotNegative | None = None
    currency: str = "USD"
    offers: dict[str, "FailureTrace"] = Field(default_factory=dict)

    def failures(self, generator: random.Random) -> Iterator[TraceFailure]:
        """Yield the failure of each attempt; ends only if the rates are zero."""
        return chain(self.recorded, self.drawn(generator))

    def drawn(self, generator: random.Random) -> Iterator[TraceFailure]:
        """Yield failures by rates alone: exponential in device time, reasons in proportion to their rates.

        An aftershock has the reason of the failure before it. The mean time between failures is that of the rates.
        """
        reasons, ladder = tuple(self.per_device_day), tuple(accumulate(self.per_device_day.values()))
        if not ladder or ladder[-1] <= 0:
            return
        shocks, reason, is_aftershock = self.aftershocks, reasons[0], False
        # How many times as long as the mean one lasts until a failure that is no aftershock.
        calm = 1 / (1 - shocks.share + shocks.share / shocks.rate_factor)
        per_second = ladder[-1] / DAY_SECONDS / calm
        while True:
            after = generator.expovariate(per_second * (shocks.rate_factor if is_aftershock else 1))
            reason = reason if is_aftershock else generator.choices(reasons, cum_weights=ladder)[0]
            wait = self.replacement_seconds if reason in _TAKES_MACHINE else 0.0
            wait = generator.expovariate(1 / wait) if wait else 0.0
            yield TraceFailure(reason=reason, after_device_seconds=after, replacement_seconds=wait)
            is_aftershock = shocks.share > 0 and generator.random() < shocks.share

    def mean_device_seconds(self, *, without: frozenset[TerminationReason] = frozenset()) -> float:
        """Return the mean device time between failures by rates, except reasons in `without`; may be infinite."""
        per_day = sum(rate for reason, rate in self.per_device_day.items() if reason not in without)
        return DAY_SECONDS / per_day if per_day > 0 else float("inf")


def published_trace() -> FailureTrace:
    """Return the interruptions of Llama 3 405B as rates per device and day."""
    source = "Llama 3 405B: 419 unexpected interruptions of 16,384 GPUs in 54 days (arXiv:2407.21783)"
    rates = {reason: count / (16_384 * 54) for reason, count in _PUBLISHED.items()}
    return FailureTrace(source=source, per_device_day=rates)


def parse_trace(text: str, *, name: str) -> FailureTrace:
    """Return the trace in a TOML or JSON text; raises `InvalidConfiguration` with one line per broken rule."""
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        return TypeAdapter(FailureTrace).validate_python({"source": name} | document)
    except ValidationError as error:
        raise InvalidConfiguration("\n".join(f"{name}: {_describe_broken(item)}" for item in error.errors())) from error
    except ValueError as error:  # both decoders' errors are ValueErrors
        raise InvalidConfiguration(f"{name}: neither TOML nor JSON: {error}") from error


def _describe_broken(item: ErrorDetails) -> str:
    key = ".".join(map(str, item["loc"])).removesuffix(".[key]")
    value = "" if item["type"] == "missing" else f" = {item['input']!r}"
    return f"{key}{value}: {describe_rule(item)}"


def describe_rule(item: ErrorDetails) -> str:
    """Return the rule that a value of a trace or plan breaks."""
    context = item.get("ctx", {})
    bounds = [f"{word} {context[name]:g}" for name, word in _BOUNDS.items() if name in context]
    rule = f"must be a number {' '.join(bounds)}" if bounds else context.get("error")
    return str(rule or _RULES.get(item["type"].partition("_")[0], "must be a table"))


def recorded_trace(state: RunState, *, restart_device_seconds: float = 0.0) -> FailureTrace:
    """Return the failures in a run's receipts and their rates; completed, fenced and cancelled are not failures.

    A simulated attempt begins with its restart: `restart_device_seconds` is added to all but the first.
    """
    recorded = []
    for attempt in state.attempts:
        ended = attempt.ended
        if ended is None or ended.reason in _NO_FAILURES:
            continue
        # A reason of a newer version is treated as one that is never retried.
        reason = TerminationReason(ended.reason) if ended.reason in set(TerminationReason) else TerminationReason.ERROR
        samples = sum(len(item.windows) for item in state.quarantines if item.attempt == attempt.started.attempt)
        remedied = ended.decision.action == DecisionAction.RESUME and not samples
        failure = TraceFailure(
            reason=reason,
            after_device_seconds=_device_seconds(attempt, restart_device_seconds),
            detail=ended.detail,
            fingerprint=ended.fingerprint,
            quarantined_samples=samples,
            repaired_objects=int(remedied and reason is TerminationReason.BAD_DATA),
        )
        recorded.append(failure)
    device_days = sum(_device_seconds(attempt, restart_device_seconds) for attempt in state.attempts) / DAY_SECONDS
    counts = Counter(failure.reason for failure in recorded)
    run_id = state.opened.run_id if state.opened else ""
    source = f"run {run_id}: {len(recorded)} failures in {device_days * 24:.3g} device hours"
    rates = {reason: count / device_days for reason, count in sorted(counts.items()) if device_days}
    return FailureTrace(source=source, per_device_day=rates, recorded=tuple(recorded))


def _device_seconds(attempt: AttemptRecord, restart_device_seconds: float) -> float:
    """Device time exposed to failures; for an open attempt, up to its last commit."""
    used = attempt.ended.gpu_seconds if attempt.ended else attempt.committed_gpu_seconds
    return used + (restart_device_seconds if attempt.started.attempt > 1 else 0.0)
