"""The answer of `cairn simulate`: policies tried on failures from a file, from a run's log or from Llama 3 405B."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from pydantic import ValidationError

from cairn.reports.queries.run_lookup import configuration_of
from cairn.reports.queries.simulation_options import SimulationOptions
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.regular_file import read_file
from cairn.tasks.configuration.settings import BudgetsConfig, CheckpointConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.policy.attempt_sizes import next_sizes, segment_end
from cairn.tasks.policy.budgets import Policy
from cairn.tasks.simulation import failure_trace, simulated_run
from cairn.tasks.simulation.failure_trace import DAY_SECONDS, FailureTrace

if TYPE_CHECKING:
    from cairn.tasks.configuration.run_configuration import RunConfig

PLAIN_RETRIES = (3, 10)
_SWEEP_SEEDS = 6
_LLAMA_DEVICES, _LLAMA_DAYS, _LLAMA_GLOBAL_BATCH = 16_384, 54.0, 2048
_STEP_SECONDS, _CHECKPOINT_SECONDS, _RESTART_SECONDS = 6.0, 10.0, 300.0
_COPIED_BYTES_PER_SECOND = 1e9
_MOST_STEPS = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The value for the seed of median goodput, and the ends between which the middle 80 % of the seeds lie."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOutcome:
    """How the run ends under one policy for the seed of median goodput, after `days`; `retries` by reason.

    `hours` are wall time by use: useful, lost, commits, restarts and waiting. Of all `seeds`, `finished_seeds` finish.
    """

    policy: str
    step: int
    stopped_by: str | None
    days: Spread
    goodput: Spread
    hours: Mapping[str, float]
    attempts: int
    retries: Mapping[str, int]
    seeds: int
    finished_seeds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferOutcome:
    """How the run ends on machines of one price: for the seed of median goodput, and the middle 80 % of the seeds.

    Money is devices by hours, without those in which a machine was waited for.
    """

    price_per_device_hour: float
    currency: str
    days: Spread
    goodput: Spread
    money: Spread
    seeds: int
    finished_seeds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationSummary:
    """The policy and plain retry counts on the same failures, and the loss at the present and other intervals.

    `offers` are the machines with a price, the cheapest run first.
    """

    run_id: str | None
    seed: int
    plan: simulated_run.SimulationPlan
    trace: FailureTrace
    hours_between_failures: float | None
    outcomes: tuple[PolicyOutcome, ...]
    intervals: Mapping[str, simulated_run.IntervalLoss]
    offers: Mapping[str, OfferOutcome]


def simulate_policies(
    options: SimulationOptions, *, state: RunState | None, environment: Mapping[str, str]
) -> SimulationSummary:
    """Return how each policy ends, for the receipts of `state` or none; raises `InvalidConfiguration`."""
    config = configuration_of(state) if state and not options.config else None
    if options.config:
        from cairn.tasks.configuration.configuration_source import load_configuration

        config = load_configuration(Path(options.config), overrides=(), environment=environment)
    if options.seeds < 1:
        raise InvalidConfiguration(f"--seeds {options.seeds}: must be at least 1")
    seeds = range(options.seed, options.seed + options.seeds)
    try:
        plan = _plan(options, state, config)
        trace = _trace(options, state, plan)
    except ValidationError as error:
        broken = ((f"{item['loc'][0]}".replace("_", "-"), item) for item in error.errors())
        lines = (f"--{name} {item['input']}: {failure_trace.describe_rule(item)}" for name, item in broken)
        raise InvalidConfiguration("\n".join(lines)) from error
    policies = {"budgets": simulated_run.budget_policy(config.budgets if config else BudgetsConfig())}
    policies |= {f"{most} retries": simulated_run.plain_retries(most) for most in PLAIN_RETRIES}
    outcomes = []
    for name, policy in policies.items():
        runs = [simulated_run.simulate(plan, trace.failures(random.Random(seed)), policy) for seed in seeds]
        outcomes.append(_outcome(name, runs))
    named = {"": trace, **trace.offers}.items()
    priced = ((name, offer) for name, offer in named if offer.price_per_device_hour is not None)
    offers = [(name, _offer(plan, offer, policies["budgets"], seeds)) for name, offer in priced]
    between = trace.mean_device_seconds() / plan.devices / 3600
    return SimulationSummary(
        run_id=state.opened.run_id if state and state.opened else None,
        seed=options.seed,
        plan=plan,
        trace=trace,
        hours_between_failures=between if between < float("inf") else None,
        outcomes=tuple(outcomes),
        offers=dict(sorted(offers, key=lambda item: (-item[1].finished_seeds, item[1].money.value))),
        intervals=simulated_run.compare_intervals(plan, trace, range(options.seed, options.seed + _SWEEP_SEEDS)),
    )


def _offer(plan: simulated_run.SimulationPlan, offer: FailureTrace, policy: Policy, seeds: range) -> OfferOutcome:
    runs = [simulated_run.simulate(plan, offer.failures(random.Random(seed)), policy) for seed in seeds]
    price, outcome = offer.price_per_device_hour or 0.0, _outcome("", runs)
    paid = [price * plan.devices * (sum(run.seconds) - run.seconds.waiting) / 3600 for run in runs]
    return OfferOutcome(
        price_per_device_hour=price,
        currency=offer.currency,
        days=outcome.days,
        goodput=outcome.goodput,
        money=_spread(paid, paid[runs.index(_median_run(runs))]),
        seeds=outcome.seeds,
        finished_seeds=outcome.finished_seeds,
    )


def _median_run(runs: Sequence[simulated_run.SimulatedRun]) -> simulated_run.SimulatedRun:
    return sorted(runs, key=lambda one: one.goodput)[len(runs) // 2]


def _spread(values: Sequence[float], value: float) -> Spread:
    ranked = sorted(values)
    low, high = round(0.1 * (len(ranked) - 1)), round(0.9 * (len(ranked) - 1))
    return Spread(value=value, low=ranked[low], high=ranked[high])


def _outcome(policy: str, runs: Sequence[simulated_run.SimulatedRun]) -> PolicyOutcome:
    run = _median_run(runs)
    return PolicyOutcome(
        policy=policy,
        step=run.step,
        stopped_by=run.stopped_by,
        days=_spread([sum(one.seconds) / DAY_SECONDS for one in runs], sum(run.seconds) / DAY_SECONDS),
        goodput=_spread([one.goodput for one in runs], run.goodput),
        hours={use: seconds / 3600 for use, seconds in run.seconds._asdict().items()},
        attempts=len(run.state.attempts),
        retries={str(reason): count for reason, count in run.retries.items()},
        seeds=len(runs),
        finished_seeds=sum(one.stopped_by is None for one in runs),
    )


def _trace(options: SimulationOptions, state: RunState | None, plan: simulated_run.SimulationPlan) -> FailureTrace:
    if options.trace:
        try:
            trace = failure_trace.parse_trace(read_file(options.trace).decode(), name=options.trace)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfiguration(f"--trace {options.trace}: cannot be read: {error}") from error
    elif state:
        trace = failure_trace.recorded_trace(state, restart_device_seconds=plan.restart_seconds * plan.devices)
    else:
        trace = failure_trace.published_trace()
    wait = options.replacement_seconds
    return trace if wait is None else replace(trace, replacement_seconds=wait)


def _plan(
    options: SimulationOptions, state: RunState | None, config: "RunConfig | None"
) -> simulated_run.SimulationPlan:
    checkpoint = config.checkpoint if config else CheckpointConfig()
    run_devices = state.attempts[-1].started.placement.devices if state and state.attempts else _LLAMA_DEVICES
    measured = _STEP_SECONDS, _CHECKPOINT_SECONDS, _RESTART_SECONDS
    if state:
        measured = _measured(state, run_devices, needs_steps=options.step_seconds is None)
    given = options.step_seconds, options.checkpoint_seconds, options.restart_seconds
    step_seconds, checkpoint_seconds, restart_seconds = (
        default if option is None else option for option, default in zip(given, measured, strict=True)
    )
    if options.days is None and state and state.opened:
        total_steps = state.opened.total_steps
    else:
        days = _LLAMA_DAYS if options.days is None else options.days
        if not (days > 0 and step_seconds > 0 and (steps := days * DAY_SECONDS / step_seconds) < _MOST_STEPS):
            raise InvalidConfiguration(f"--days {days}, --step-seconds {step_seconds}: must be above 0, < 1e12 steps")
        total_steps = max(round(steps), 1)
    sizes = next_sizes(RunState(), config.training, config.model.block_size) if config else None
    return simulated_run.SimulationPlan(
        total_steps=total_steps,
        devices=run_devices if options.devices is None else options.devices,
        step_seconds=step_seconds,
        every_steps=segment_end(0, checkpoint, total_steps=checkpoint.every_steps, step_seconds=step_seconds),
        checkpoint_seconds=checkpoint_seconds,
        restart_seconds=restart_seconds,
        grace_seconds=checkpoint.grace_seconds,
        micro_batch=sizes.micro_batch if sizes else _LLAMA_GLOBAL_BATCH,
        global_batch=config.training.global_batch if config else _LLAMA_GLOBAL_BATCH,
    )


def _measured(state: RunState, devices: int, *, needs_steps: bool) -> tuple[float, float, float]:
    """Return the seconds of a step, of a commit and of a restart by the run's log."""
    steps, seconds, starts = 0, 0.0, []
    for attempt in state.attempts:
        used = attempt.started.placement.devices
        if attempt.last_committed_step is not None:
            steps += attempt.last_committed_step - attempt.started.first_step
            seconds += attempt.committed_gpu_seconds / used
        if attempt.ended and attempt.ended_at:  # the part of its time in which its trainer did not train
            whole = (attempt.ended_at - attempt.started_at).total_seconds()
            starts.append(max(whole - attempt.ended.gpu_seconds / used, 0.0))
    if needs_steps and not (steps > 0 and seconds > 0):
        why = "the run has committed nothing yet that a step could be timed by"
        raise InvalidConfiguration(f"{why}: give --step-seconds")
    newest, step_seconds = state.newest_committed, seconds / max(steps, 1)
    copied = newest.committed.bytes / devices / _COPIED_BYTES_PER_SECOND if newest else _CHECKPOINT_SECONDS
    return step_seconds, max(copied, step_seconds), median(starts) if starts else _RESTART_SECONDS
