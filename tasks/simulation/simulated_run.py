"""Simulation of a run through a sequence of failures under a retry policy, from failure to failure in closed form.

A step, a commit and a restart take fixed times; training stands still during a commit. Receipts and their decisions
are those of a real run: `write_receipt` writes them and the log's own fold reads them. Failures do not depend on the
policy. Intervals between commits are compared with those of Young (CACM 17, 1974), sqrt(2 C M) seconds with C the
cost of a commit and M the mean time between failures that lose work, and of Daly (FGCS 22, 2006, equation 37).
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from itertools import chain, islice, repeat
from typing import Any, Self

from cairn.storage.logs import log_entry, run_entries, run_log, run_state
from cairn.storage.logs.run_entries import DataQuarantined, Decision
from cairn.tasks.attempt.attempt_end import AttemptOver, Remedy, Usage, write_receipt
from cairn.tasks.configuration.settings import BudgetsConfig
from cairn.tasks.policy.budgets import FailureImpact, Policy, decide
from cairn.tasks.policy.failures import Evidence, Failure
from cairn.tasks.policy.termination import DecisionAction, TerminationReason
from cairn.tasks.simulation.failure_trace import FailureTrace, TraceFailure

MOST_ATTEMPTS = 10_000
_TIME = datetime(2000, 1, 1, tzinfo=UTC)
"""Every time in the state; no policy reads one."""
_PLACEMENT = run_entries.Placement(
    host="", boot_id="", pid_namespace="", pid=1, start_ticks=0, device="", world_size=1, threads=1
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationPlan:
    """The steps to train, the number of devices, and the time that each part takes."""

    total_steps: int
    devices: int
    step_seconds: float
    every_steps: int
    checkpoint_seconds: float
    restart_seconds: float
    grace_seconds: float
    micro_batch: int = 1
    global_batch: int = 1

    def __post_init__(self) -> None:
        for name in ("total_steps", "devices", "every_steps", "micro_batch", "global_batch", "step_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        for name in ("checkpoint_seconds", "restart_seconds", "grace_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSpan:
    """How far one attempt got and where its wall time went, in seconds."""

    committed_step: int
    last_step: int
    restart_seconds: float
    commits: int = 0
    lost_seconds: float = 0.0
    is_finished: bool = False


def train_until(
    plan: SimulationPlan, failure: TraceFailure | None, *, first_step: int, restart_seconds: float
) -> AttemptSpan:
    """Return an attempt from `first_step` until its failure, or until the run's end.

    After the last commit it fails, or gets a notice of a preemption and commits in its grace.
    """
    failure_seconds = failure.after_device_seconds / plan.devices if failure else math.inf
    if failure_seconds < restart_seconds:
        return AttemptSpan(committed_step=first_step, last_step=first_step, restart_seconds=failure_seconds)
    span = partial(AttemptSpan, restart_seconds=restart_seconds)
    every, last = plan.every_steps, plan.total_steps
    behind = first_step // every
    all_commits = -(-last // every) - behind
    training = failure_seconds - restart_seconds
    if training >= (last - first_step) * plan.step_seconds + all_commits * plan.checkpoint_seconds:
        return span(committed_step=last, last_step=last, commits=all_commits, is_finished=True)
    first_end = (min(last, (behind + 1) * every) - first_step) * plan.step_seconds + plan.checkpoint_seconds
    whole = every * plan.step_seconds + plan.checkpoint_seconds
    commits = 0 if training < first_end else min(1 + int((training - first_end) / whole), all_commits - 1)
    step = (behind + commits) * every if commits else first_step
    since = max(training - (step - first_step) * plan.step_seconds - commits * plan.checkpoint_seconds, 0.0)
    boundary = min(last, (step // every + 1) * every)
    if failure is not None and failure.reason is TerminationReason.PREEMPTED:
        reached = min(step + math.ceil(since / plan.step_seconds), boundary)
        if reached == step:
            return span(committed_step=step, last_step=step, commits=commits)
        if (reached - step) * plan.step_seconds + plan.checkpoint_seconds - since <= plan.grace_seconds:
            is_last = reached == last
            return span(committed_step=reached, last_step=reached, commits=commits + 1, is_finished=is_last)
        since += plan.grace_seconds
    last_step = min(step + int(since / plan.step_seconds), boundary)
    return span(committed_step=step, last_step=last_step, commits=commits, lost_seconds=since)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRun:
    """How a run ended under a policy and where its time went; `state` has every receipt with its decision."""

    plan: SimulationPlan
    state: run_state.RunState = field(default_factory=run_state.RunState)
    step: int = 0
    commits: int = 0
    restart_seconds: float = 0.0
    lost_seconds: float = 0.0
    waiting_seconds: float = 0.0
    is_finished: bool = False
    stopped_by: str | None = None

    def after(self, span: AttemptSpan, waiting_seconds: float = 0.0) -> Self:
        """Return the run after one more attempt, and the wait for the next if it did not finish."""
        return replace(
            self,
            step=span.committed_step,
            commits=self.commits + span.commits,
            restart_seconds=self.restart_seconds + span.restart_seconds,
            lost_seconds=self.lost_seconds + span.lost_seconds,
            waiting_seconds=self.waiting_seconds + (0.0 if span.is_finished else waiting_seconds),
            is_finished=span.is_finished,
        )

    @property
    def useful_seconds(self) -> float:
        """Wall seconds spent on steps that are committed."""
        return self.step * self.plan.step_seconds

    @property
    def checkpoint_seconds(self) -> float:
        """Wall seconds in which training stood still for commits."""
        return self.commits * self.plan.checkpoint_seconds

    @property
    def wall_seconds(self) -> float:
        """Wall seconds from the first step to the end."""
        spent = self.useful_seconds + self.checkpoint_seconds + self.restart_seconds
        return spent + self.lost_seconds + self.waiting_seconds

    @property
    def goodput(self) -> float:
        """Useful share of the wall time; 0 for a run that never started."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def retries(self) -> Mapping[str, int]:
        """Reason → number of attempts that it ended and another one followed."""
        ended = (attempt.ended for attempt in self.state.attempts if attempt.ended)
        return Counter(receipt.reason for receipt in ended if receipt.decision.action == DecisionAction.RESUME)


def budget_policy(budgets: BudgetsConfig) -> Policy:
    """Return the policy of a real run with these budgets, with delays of average jitter."""
    return partial(decide, budgets, jitter=0.5)


def plain_retries(most: int) -> Policy:
    """Return the policy of a plain retry counter: at most `most` retries in total, for any reason."""

    def policy(state: run_state.RunState, failure: Failure, impact: FailureImpact) -> Decision:
        if len(state.attempts) > most:
            return Decision(action=DecisionAction.STOP, reason=f"{failure.reason} after {most} retries for any reason")
        return Decision(action=DecisionAction.RESUME, reason=f"retry {len(state.attempts)} of {most}")

    return policy


def simulate(plan: SimulationPlan, failures: Iterable[TraceFailure], policy: Policy) -> SimulatedRun:
    """Return the run at its end: finished, stopped by the policy, or cut off after `MOST_ATTEMPTS`."""
    run, sequence = SimulatedRun(plan=plan), iter(failures)
    while len(run.state.attempts) < MOST_ATTEMPTS:
        event = next(sequence, None)
        restart = plan.restart_seconds if run.state.attempts else 0.0
        run = _with_attempt(run, train_until(plan, event, first_step=run.step, restart_seconds=restart), event, policy)
        if run.is_finished or run.stopped_by is not None:
            return run
    return replace(run, stopped_by=f"cut off after {MOST_ATTEMPTS:,} attempts")


def _with_attempt(run: SimulatedRun, span: AttemptSpan, event: TraceFailure | None, policy: Policy) -> SimulatedRun:
    """Return the run after an attempt that ended with `event`; a failure in the data is in the samples of one step."""
    plan, state = run.plan, _with_commit(run, span)
    number, finished = state.latest_attempt, event is None or span.is_finished
    failure = Failure(reason=TerminationReason.COMPLETED, detail="the last step is committed", fingerprint="")
    remedy = Remedy()
    if event is not None and not finished:
        place = f" after step {span.last_step}" if event.reason is TerminationReason.HUNG else ""
        fingerprint = event.fingerprint or f"{event.reason}{place}"
        failure = Failure(reason=event.reason, detail=event.detail, fingerprint=fingerprint)
        samples, first = event.quarantined_samples, sum(len(item.windows) for item in state.quarantines)
        if samples is None:
            is_in_data = event.reason in (TerminationReason.BAD_DATA, TerminationReason.DIVERGED)
            samples = plan.global_batch if is_in_data else 0
        repaired = ("an object",) * event.repaired_objects
        remedy = Remedy(windows=tuple(range(first, first + samples)), repaired_objects=repaired)
    gpu_seconds = state.attempts[-1].committed_gpu_seconds + span.lost_seconds * plan.devices
    usage = Usage(last_step=span.last_step, tokens=0, gpu_seconds=gpu_seconds)
    over = AttemptOver(attempt=number, evidence=Evidence(), usage=usage)
    policy = partial(decide, BudgetsConfig()) if finished else policy
    receipt = write_receipt(state, failure, over, policy=policy, remedy=remedy)
    decision, resumes = receipt.decision, receipt.decision.action == DecisionAction.RESUME
    if resumes and remedy.windows:
        body = DataQuarantined(attempt=number, reason=failure.reason, windows=remedy.windows, detail=failure.detail)
        state = _fold(state, body)
    waited = max(decision.delay_seconds, event.replacement_seconds) if event and resumes else 0.0
    stopped_by = None if finished or resumes else f"{failure.reason}: {decision.reason or 'never retried'}"
    return replace(run.after(span, waited), state=_fold(state, receipt), stopped_by=stopped_by)


def _with_commit(run: SimulatedRun, span: AttemptSpan) -> run_state.RunState:
    """Return the state with one more attempt open and its newest commit, if it made one; older ones are superseded."""
    state, plan, number = run.state, run.plan, run.state.latest_attempt + 1
    newest = state.newest_committed
    started = run_entries.AttemptStarted(
        attempt=number,
        placement=_PLACEMENT,
        config={"training": {"global_batch": plan.global_batch}},
        config_sha256="",
        code_version="",
        micro_batch=min(plan.micro_batch, state.smallest_micro_batch or plan.micro_batch),
        resumed_from=newest.committed.reference if newest else None,
        activation_checkpointing=state.recomputes_activations,
    )
    state, step = _fold(state, started), span.committed_step
    if step == run.step:
        return state
    used_seconds = (step - run.step) * plan.step_seconds + span.commits * plan.checkpoint_seconds
    committed = run_entries.CheckpointCommitted(
        step=step,
        attempt=number,
        prefix=f"step-{step:08d}-attempt-{number:04d}",
        manifest_sha256="",
        state_sha256="",
        bytes=0,
        tokens=0,
        gpu_seconds=used_seconds * plan.devices,
    )
    return _fold(replace(state, live_checkpoints=()), committed)


def _fold(state: run_state.RunState, body: Any) -> run_state.RunState:
    """Return the state after one more entry of the newest attempt."""
    entry = run_log.imagined_entry(body, log_entry.Writer(host="", pid=1, attempt=state.latest_attempt))
    return run_log.fold([replace(entry, at=_TIME)], state)


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
