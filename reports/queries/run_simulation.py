"""The answer of `cairn simulate`: policies tried on failures from a file, from a run's log or from Llama 3 405B."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from reports.queries.run_lookup import configuration_of
from reports.queries.simulation_options import SimulationOptions
from storage.logs.run_state import AttemptRecord, RunState
from storage.stores.document import project
from tasks.configuration.settings import BudgetsConfig, CheckpointConfig
from tasks.errors import InvalidConfiguration
from tasks.policy.attempt_sizes import next_sizes, segment_end
from tasks.policy.checkpoint_interval import IntervalComparison, compare_intervals
from tasks.policy.failure_trace import (
    DAY_SECONDS,
    FailureTrace,
    InvalidTrace,
    parse_trace,
    published_trace,
    recorded_trace,
)
from tasks.policy.simulation import SimulatedRun, SimulationPlan, budget_policy, plain_retries, simulate

if TYPE_CHECKING:
    from tasks.configuration.run_configuration import RunConfig

PLAIN_RETRIES = (3, 10)
_SWEEP_SEEDS = 6
_LLAMA_DEVICES, _LLAMA_DAYS, _LLAMA_GLOBAL_BATCH = 16_384, 54.0, 2048
_STEP_SECONDS, _CHECKPOINT_SECONDS, _RESTART_SECONDS = 6.0, 10.0, 300.0
_COPIED_BYTES_PER_SECOND = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSummary:
    """The failures: hours between them on these devices, and the rate of each reason."""

    source: str
    hours_between_failures: float | None
    per_device_day: Mapping[str, float]
    recorded: int
    replacement_seconds: float
    aftershock_share: float
    aftershock_rate_factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeSpread:
    """The middle 80 % of a policy's ends over all seeds, and how many of them finish."""

    seeds: int
    finished: int
    days_low: float
    days_high: float
    goodput_low: float
    goodput_high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOutcome:
    """How the run ends under one policy, after `days`, for the seed of median goodput; `retries` by reason."""

    policy: str
    finished: bool
    days: float
    goodput: float
    useful_gpu_hours: float
    wasted_gpu_hours: float
    checkpoint_gpu_hours: float
    restart_gpu_hours: float
    waiting_hours: float
    attempts: int
    retries: Mapping[str, int]
    step: int
    total_steps: int
    stopped_by: str | None
    spread: OutcomeSpread


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationSummary:
    """The policy and plain retry counts on the same failures, and the checkpoint interval that loses least."""

    run_id: str | None
    seed: int
    plan: SimulationPlan
    trace: TraceSummary
    outcomes: tuple[PolicyOutcome, ...]
    intervals: IntervalComparison


def simulate_policies(
    options: SimulationOptions, *, state: RunState | None, environment: Mapping[str, str]
) -> SimulationSummary:
    """Return how each policy ends, for the receipts of `state` or none; raises `InvalidConfiguration`."""
    config = _config(options, state, environment)
    try:
        plan = _plan(options, state, config)
        trace = _trace(options, state, plan)
        if options.seeds < 1:
            raise InvalidConfiguration(f"--seeds {options.seeds}: must be at least 1")
        seeds = range(options.seed, options.seed + options.seeds)
        return _simulate(plan, trace, config.budgets if config else BudgetsConfig(), seeds, state)
    except (InvalidTrace, ValueError) as error:
        raise InvalidConfiguration(str(error)) from error


def _simulate(
    plan: SimulationPlan, trace: FailureTrace, budgets: BudgetsConfig, seeds: range, state: RunState | None
) -> SimulationSummary:
    policies = {"budgets": budget_policy(budgets)} | {f"{n} retries": plain_retries(n) for n in PLAIN_RETRIES}
    ends = {
        name: [simulate(plan, trace.failures(random.Random(seed)), policy) for seed in seeds]
        for name, policy in policies.items()
    }
    between = trace.mean_device_seconds() / plan.devices / 3600
    return SimulationSummary(
        run_id=state.opened.run_id if state and state.opened else None,
        seed=seeds.start,
        plan=plan,
        trace=TraceSummary(
            source=trace.source,
            hours_between_failures=between if between < float("inf") else None,
            per_device_day={reason.value: rate for reason, rate in trace.rates.items()},
            recorded=len(trace.recorded),
            replacement_seconds=trace.replacement_seconds,
            aftershock_share=trace.aftershocks.share,
            aftershock_rate_factor=trace.aftershocks.rate_factor,
        ),
        outcomes=tuple(_outcome(name, runs) for name, runs in ends.items()),
        intervals=compare_intervals(plan, trace, range(seeds.start, seeds.start + _SWEEP_SEEDS)),
    )


def _spread(runs: Sequence[SimulatedRun]) -> OutcomeSpread:
    days, goodput = (sorted(values) for values in zip(*((r.wall_seconds, r.goodput) for r in runs), strict=True))
    low, high = round(0.1 * (len(runs) - 1)), round(0.9 * (len(runs) - 1))
    return OutcomeSpread(
        seeds=len(runs),
        finished=sum(run.is_finished for run in runs),
        days_low=days[low] / DAY_SECONDS,
        days_high=days[high] / DAY_SECONDS,
        goodput_low=goodput[low],
        goodput_high=goodput[high],
    )


def _outcome(policy: str, runs: Sequence[SimulatedRun]) -> PolicyOutcome:
    run = sorted(runs, key=lambda one: one.goodput)[len(runs) // 2]
    gpu_hours = run.plan.devices / 3600
    return project(
        run,
        PolicyOutcome,
        policy=policy,
        finished=run.is_finished,
        days=run.wall_seconds / DAY_SECONDS,
        useful_gpu_hours=run.useful_seconds * gpu_hours,
        wasted_gpu_hours=run.lost_seconds * gpu_hours,
        checkpoint_gpu_hours=run.checkpoint_seconds * gpu_hours,
        restart_gpu_hours=run.restart_seconds * gpu_hours,
        waiting_hours=run.waiting_seconds / 3600,
        attempts=len(run.state.attempts),
        retries={str(reason): count for reason, count in run.retries.items()},
        total_steps=run.plan.total_steps,
        spread=_spread(runs),
    )


def _config(options: SimulationOptions, state: RunState | None, environment: Mapping[str, str]) -> "RunConfig | None":
    if not options.config:
        return configuration_of(state) if state else None
    from tasks.configuration.configuration_source import load_configuration

    return load_configuration(Path(options.config), overrides=(), environment=environment)


def _trace(options: SimulationOptions, state: RunState | None, plan: SimulationPlan) -> FailureTrace:
    trace = _named_trace(options, state, plan)
    wait = options.replacement_seconds
    return trace if wait is None else replace(trace, replacement_seconds=wait)


def _named_trace(options: SimulationOptions, state: RunState | None, plan: SimulationPlan) -> FailureTrace:
    if not options.trace:
        restart_device_seconds = plan.restart_seconds * plan.devices
        return recorded_trace(state, restart_device_seconds=restart_device_seconds) if state else published_trace()
    try:
        return parse_trace(Path(options.trace).read_text(encoding="utf-8"), name=options.trace)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(f"--trace {options.trace}: cannot be read: {error}") from error


def _plan(options: SimulationOptions, state: RunState | None, config: "RunConfig | None") -> SimulationPlan:
    checkpoint = config.checkpoint if config else CheckpointConfig()
    measured = _measured(state, options) if state else (_STEP_SECONDS, _CHECKPOINT_SECONDS, _RESTART_SECONDS)
    step_seconds, checkpoint_seconds, restart_seconds = (
        default if given is None else given
        for given, default in zip(
            (options.step_seconds, options.checkpoint_seconds, options.restart_seconds), measured, strict=True
        )
    )
    return SimulationPlan(
        total_steps=_total_steps(options.days, state, step_seconds),
        devices=_devices(state) if options.devices is None else options.devices,
        step_seconds=step_seconds,
        every_steps=segment_end(0, checkpoint, total_steps=checkpoint.every_steps, step_seconds=step_seconds),
        checkpoint_seconds=checkpoint_seconds,
        restart_seconds=restart_seconds,
        grace_seconds=checkpoint.grace_seconds,
        micro_batch=next_sizes(RunState(), config.training).micro_batch if config else _LLAMA_GLOBAL_BATCH,
        global_batch=config.training.global_batch if config else _LLAMA_GLOBAL_BATCH,
    )


def _total_steps(days: float | None, state: RunState | None, step_seconds: float) -> int:
    if days is None and state and state.opened:
        return state.opened.total_steps
    days = _LLAMA_DAYS if days is None else days
    if not (0 < days < float("inf") and 0 < step_seconds < float("inf")):
        raise ValueError(f"days={days}, step_seconds={step_seconds}: must be above 0")
    return max(round(days * DAY_SECONDS / step_seconds), 1)


def _devices(state: RunState | None) -> int:
    if state and state.attempts:
        return state.attempts[-1].started.placement.world_size
    return _LLAMA_DEVICES


def _measured(state: RunState, options: SimulationOptions) -> tuple[float, float, float]:
    """Return the seconds of a step, of a commit and of a restart by the run's log."""
    steps, seconds = 0, 0.0
    for attempt in state.attempts:
        if attempt.last_committed_step is not None:
            steps += attempt.last_committed_step - attempt.started.first_step
            seconds += attempt.committed_gpu_seconds / attempt.started.placement.world_size
    if options.step_seconds is None and not (steps > 0 and seconds > 0):
        raise InvalidConfiguration(
            "the run has committed nothing yet that a step could be timed by: give --step-seconds"
        )
    newest = state.newest_committed
    copied = newest.committed.bytes / _devices(state) / _COPIED_BYTES_PER_SECOND if newest else _CHECKPOINT_SECONDS
    starts = [_start_seconds(attempt) for attempt in state.attempts if attempt.ended]
    step_seconds = seconds / max(steps, 1)
    return step_seconds, max(copied, step_seconds), median(starts) if starts else _RESTART_SECONDS


def _start_seconds(attempt: AttemptRecord) -> float:
    """Return the part of an attempt's time in which its trainer did not train."""
    assert attempt.ended is not None and attempt.ended_at is not None
    whole = (attempt.ended_at - attempt.started_at).total_seconds()
    return max(whole - attempt.ended.gpu_seconds / attempt.started.placement.world_size, 0.0)
