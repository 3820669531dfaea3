"""How often to commit: the formulas of Young and Daly, beside a simulation of many intervals.

Young (CACM 17, 1974): sqrt(2 C M) seconds of training between commits, with C the cost of a commit and M the mean time
between failures that lose work. Daly (FGCS 22, 2006, equation 37) carries the series two terms further.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice, repeat

from cairn.tasks.policy.termination import TerminationReason
from cairn.tasks.simulation.failure_trace import FailureTrace
from cairn.tasks.simulation.simulated_run import SimulatedRun, SimulationPlan, train_until


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalLoss:
    """The share of wall time that is not useful with a commit every `every_steps` steps: mean, least and most."""

    every_steps: int
    seconds: float
    lost_share: float
    lost_least: float
    lost_most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalComparison:
    """A run's own interval beside the formulas' and the simulation's best, None if no failure ever loses work."""

    present: IntervalLoss
    young: IntervalLoss | None
    daly: IntervalLoss | None
    simulated: IntervalLoss | None
    sweep: tuple[IntervalLoss, ...]


def young_seconds(checkpoint_seconds: float, between_failures_seconds: float) -> float:
    """Return Young's interval: seconds of training between commits."""
    return math.sqrt(2 * checkpoint_seconds * between_failures_seconds)


def daly_seconds(checkpoint_seconds: float, between_failures_seconds: float) -> float:
    """Return Daly's interval: seconds of training between commits, without the commit itself."""
    if checkpoint_seconds >= 2 * between_failures_seconds:
        return between_failures_seconds
    ratio = checkpoint_seconds / (2 * between_failures_seconds)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return young_seconds(checkpoint_seconds, between_failures_seconds) * series - checkpoint_seconds


def measure_interval(plan: SimulationPlan, trace: FailureTrace, seeds: Sequence[int]) -> IntervalLoss:
    """Return the shares of wall time that are not useful, over runs with drawn failures that always resume."""
    shares = []
    for seed in seeds:
        # As `simulate` for at most 2,000 attempts that always resume, without the costly receipts.
        run, restart_seconds = SimulatedRun(plan=plan), 0.0
        for event in islice(chain(trace.drawn(random.Random(seed)), repeat(None)), 2_000):
            span = train_until(plan, event, first_step=run.step, restart_seconds=restart_seconds)
            run, restart_seconds = run.after(span, event.replacement_seconds if event else 0.0), plan.restart_seconds
            if run.is_finished:
                break
        shares.append(1 - run.goodput)
    return IntervalLoss(
        every_steps=plan.every_steps,
        seconds=plan.every_steps * plan.step_seconds,
        lost_share=sum(shares) / len(shares),
        lost_least=min(shares),
        lost_most=max(shares),
    )


def compare_intervals(plan: SimulationPlan, trace: FailureTrace, seeds: Sequence[int]) -> IntervalComparison:
    """Return the plan's own interval, both formulas' and the best of a sweep around them, on the same failures.

    A short run is lengthened to about 200 failures, because the long-run share is wanted.
    """
    notice_saves_all = plan.grace_seconds >= plan.step_seconds + plan.checkpoint_seconds
    announced = frozenset({TerminationReason.PREEMPTED}) if notice_saves_all else frozenset()
    between = trace.mean_device_seconds(without=announced) / plan.devices
    steps_wanted = 0 if math.isinf(between) else math.ceil(200 * between / plan.step_seconds)
    long_run = replace(plan, total_steps=max(plan.total_steps, steps_wanted))

    @cache
    def measure(steps: int) -> IntervalLoss:
        return measure_interval(replace(long_run, every_steps=steps), trace, seeds)

    present = measure(plan.every_steps)
    if math.isinf(between):
        return IntervalComparison(present=present, young=None, daly=None, simulated=None, sweep=(present,))
    by_young, by_daly = (formula(plan.checkpoint_seconds, between) for formula in (young_seconds, daly_seconds))
    young, daly = measure(_steps(by_young, plan)), measure(_steps(by_daly, plan))
    # From a quarter to four times the formulas, on a logarithmic scale.
    around = (max(by_daly, by_young / 2) * 2 ** (n / 3) for n in range(-6, 7))
    swept = [measure(steps) for steps in sorted({_steps(seconds, plan) for seconds in around})]
    best, all_measured = min(swept, key=lambda item: item.lost_share), {present, young, daly, *swept}
    sweep = tuple(sorted(all_measured, key=lambda item: item.every_steps))
    return IntervalComparison(present=present, young=young, daly=daly, simulated=best, sweep=sweep)


def _steps(seconds: float, plan: SimulationPlan) -> int:
    return min(max(round(seconds / plan.step_seconds), 1), plan.total_steps)
