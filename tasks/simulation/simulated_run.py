"""Simulation of a run through a sequence of failures under a retry policy, from failure to failure in closed form.

A step, a commit and a restart take fixed times; training stands still during a commit. Receipts and their decisions
are those of a real run: `write_receipt` writes them and the log's own fold reads them. Failures do not depend on the
policy. Intervals between commits are compared with those of Young (CACM 17, 1974), sqrt(2 C M) seconds with C the
cost of a commit and M the mean time between failures that lose work, and of Daly (FGCS 22, 2006, equation 37).
"""

import math
import operator
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from cairn.storage.logs import log_entry, run_log, run_state
from cairn.storage.logs.run_entries import AttemptStarted, CheckpointCommitted, DataQuarantined, Decision, Placement
from cairn.storage.logs.step_log import Heartbeat
from cairn.tasks.attempt.attempt_entries import AttemptOver, Remedy, write_receipt
from cairn.tasks.configuration.settings import BudgetsConfig
from cairn.tasks.policy.budgets import FailureImpact, Policy, decide
from cairn.tasks.policy.failures import Evidence, Failure
from cairn.tasks.policy.termination import DecisionAction, TerminationReason
from cairn.tasks.simulation.failure_trace import FailureTrace, NotNegative, TraceFailure

MOST_ATTEMPTS = 10_000
_TIME = datetime(2000, 1, 1, tzinfo=UTC)
"""Every time in the state; no policy reads one."""
_PLACEMENT = Placement(host="", boot_id="", pid_namespace="", pid=1, start_ticks=0, device="", world_size=1, threads=1)
_Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class SimulationPlan:
    """The steps to train, the number of devices, and the time that each part takes."""

    total_steps: _Count
    devices: _Count
    step_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    every_steps: _Count
    checkpoint_seconds: NotNegative
    restart_seconds: NotNegative
    grace_seconds: NotNegative
    micro_batch: _Count = 1
    global_batch: _Count = 1


class WallSeconds(NamedTuple):
    """Wall time by its use: committed steps, steps that were lost, commits, restarts, waiting between attempts."""

    useful: float = 0.0
    lost: float = 0.0
    commits: float = 0.0
    restarts: float = 0.0
    waiting: float = 0.0

    def plus(self, other: "WallSeconds") -> "WallSeconds":
        """Return the sum, use by use."""
        return WallSeconds(*map(operator.add, self, other))


class AttemptSpan(NamedTuple):
    """How far one attempt got and where its wall time went."""

    committed_step: int
    last_step: int
    seconds: WallSeconds


def train_until(
    plan: SimulationPlan, failure: TraceFailure | None, *, first_step: int, restart_seconds: float
) -> AttemptSpan:
    """Return an attempt from `first_step` until its failure, or until the run's end.

    After the last commit it fails, or gets a notice of a preemption and commits in its grace.
    """
    seconds = failure.after_device_seconds / plan.devices if failure else math.inf
    if seconds < restart_seconds:
        return AttemptSpan(first_step, first_step, WallSeconds(restarts=seconds))
    every, last = plan.every_steps, plan.total_steps
    step_seconds, commit_seconds = plan.step_seconds, plan.checkpoint_seconds
    before, lost = first_step // every, 0.0
    # The time at which the failure comes on a clock on which step 0 begins at 0 and every step has one place.
    now = first_step * step_seconds + before * commit_seconds + seconds - restart_seconds
    commits = -(-last // every)
    if now >= last * step_seconds + commits * commit_seconds:
        committed = reached = last
    else:
        commits = max(int(now / (every * step_seconds + commit_seconds)), before)
        committed = max(first_step, commits * every)
        lost = max(now - committed * step_seconds - commits * commit_seconds, 0.0)
        boundary = min(last, (committed // every + 1) * every)
        announced = min(committed + math.ceil(lost / step_seconds), boundary)
        needed = (announced - committed) * step_seconds + commit_seconds - lost
        if failure is not None and failure.reason is TerminationReason.PREEMPTED and announced > committed:
            if needed <= plan.grace_seconds:
                committed, commits, lost = announced, commits + 1, 0.0
            else:
                lost += plan.grace_seconds
        reached = min(committed + int(lost / step_seconds), boundary)
    useful, committing = (committed - first_step) * step_seconds, (commits - before) * commit_seconds
    spent = WallSeconds(useful=useful, lost=lost, commits=committing, restarts=restart_seconds)
    return AttemptSpan(committed, reached, spent)


class SimulatedRun(NamedTuple):
    """How a run ended under a policy and where its time went; `state` has every receipt with its decision."""

    state: run_state.RunState
    step: int
    seconds: WallSeconds
    stopped_by: str | None

    @property
    def goodput(self) -> float:
        """Useful share of the wall time; 0 for a run that never started."""
        return self.seconds.useful / sum(self.seconds) if sum(self.seconds) else 0.0

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
        stops = len(state.attempts) > most
        reason = f"{failure.reason} after {most} retries for any reason" if stops else ""
        return Decision(action=DecisionAction.STOP if stops else DecisionAction.RESUME, reason=reason)

    return policy


def simulate(
    plan: SimulationPlan, failures: Iterable[TraceFailure], policy: Policy | None, most_attempts: int = MOST_ATTEMPTS
) -> SimulatedRun:
    """Return the run at its end: finished, stopped by the policy, or cut off after so many attempts.

    Without a policy every failure is followed by another attempt, and the costly receipts are not written.
    """
    state, sequence, step, spent, restart = run_state.RunState(), iter(failures), 0, WallSeconds(), 0.0
    for _ in range(most_attempts):
        event = next(sequence, None)
        span = train_until(plan, event, first_step=step, restart_seconds=restart)
        step, spent, restart = span.committed_step, spent.plus(span.seconds), plan.restart_seconds
        state = _begin(plan, state, span) if policy else state
        if event is None or step == plan.total_steps:
            return SimulatedRun(state, step, spent, None)
        wait = event.replacement_seconds
        if policy:
            state, decision = _end(plan, state, span, event, policy)
            wait = max(wait, decision.delay_seconds)
            if decision.action != DecisionAction.RESUME:
                return SimulatedRun(state, step, spent, f"{event.reason}: {decision.reason or 'never retried'}")
        spent = spent.plus(WallSeconds(waiting=wait))
    return SimulatedRun(state, step, spent, f"cut off after {most_attempts:,} attempts")


def _begin(plan: SimulationPlan, state: run_state.RunState, span: AttemptSpan) -> run_state.RunState:
    """Return the state with one more attempt open and its newest commit, if it made one; older ones are superseded."""
    number, newest = state.latest_attempt + 1, state.newest_committed
    started = AttemptStarted(
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
    if not span.seconds.useful:
        return state
    used, name = (span.seconds.useful + span.seconds.commits) * plan.devices, f"step-{step}-attempt-{number}"
    committed = CheckpointCommitted(
        step=step, attempt=number, prefix=name, manifest_sha256="", state_sha256="", bytes=0, tokens=0, gpu_seconds=used
    )
    return _fold(replace(state, live_checkpoints=()), committed)


def _end(
    plan: SimulationPlan, state: run_state.RunState, span: AttemptSpan, event: TraceFailure, policy: Policy
) -> tuple[run_state.RunState, Decision]:
    """Return the state after the open attempt ended with `event`, and the decision.

    A failure in the data is in the samples of one step.
    """
    place = f" after step {span.last_step}" if event.reason is TerminationReason.HUNG else ""
    fingerprint = event.fingerprint or f"{event.reason}{place}"
    failure = Failure(reason=event.reason, detail=event.detail, fingerprint=fingerprint)
    samples, first = event.quarantined_samples, sum(len(item.windows) for item in state.quarantines)
    if samples is None:
        is_in_data = event.reason in (TerminationReason.BAD_DATA, TerminationReason.DIVERGED)
        samples = plan.global_batch if is_in_data else 0
    windows = tuple(range(first, first + samples))
    remedy = Remedy(windows=windows, repaired_objects=("an object",) * event.repaired_objects)
    gpu_seconds = state.attempts[-1].committed_gpu_seconds + span.seconds.lost * plan.devices
    number = state.latest_attempt
    last = Heartbeat(attempt=number, beat=0, step=span.last_step, train_loss=None, tokens=0, gpu_seconds=gpu_seconds)
    receipt = write_receipt(state, failure, AttemptOver(attempt=number, evidence=Evidence(), last=last), policy, remedy)
    if windows and receipt.decision.action == DecisionAction.RESUME:
        state = _fold(state, DataQuarantined(attempt=number, reason=event.reason, windows=windows, detail=""))
    return _fold(state, receipt), receipt.decision


def _fold(state: run_state.RunState, body: Any) -> run_state.RunState:
    """Return the state after one more entry of the newest attempt."""
    entry = run_log.imagined_entry(body, log_entry.Writer(host="", pid=1, attempt=state.latest_attempt))
    return run_log.fold([replace(entry, at=_TIME)], state)


@dataclass(frozen=True, kw_only=True)
class IntervalLoss:
    """The share of wall time that is not useful with a commit every `every_steps` steps: mean, least and most."""

    every_steps: int
    seconds: float
    lost_share: float
    lost_least: float
    lost_most: float


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


def compare_intervals(plan: SimulationPlan, trace: FailureTrace, seeds: Sequence[int]) -> dict[str, IntervalLoss]:
    """Return the loss with the plan's own interval, Young's, Daly's and the best of a sweep, on the same failures.

    Without failures that lose work there is only the own one. A short run is lengthened to about 200 failures, because
    the long-run share is wanted.
    """
    notice_saves_all = plan.grace_seconds >= plan.step_seconds + plan.checkpoint_seconds
    announced = frozenset({TerminationReason.PREEMPTED}) if notice_saves_all else frozenset()
    between = trace.mean_device_seconds(without=announced) / plan.devices
    steps_wanted = 0 if math.isinf(between) else math.ceil(200 * between / plan.step_seconds)
    long_run = replace(plan, total_steps=max(plan.total_steps, steps_wanted))

    @cache
    def measure(steps: int) -> IntervalLoss:
        tried = replace(long_run, every_steps=steps)
        runs = (simulate(tried, trace.drawn(random.Random(seed)), None, most_attempts=2_000) for seed in seeds)
        lost = [1 - run.goodput for run in runs]
        seconds, mean = steps * plan.step_seconds, sum(lost) / len(lost)
        return IntervalLoss(
            every_steps=steps, seconds=seconds, lost_share=mean, lost_least=min(lost), lost_most=max(lost)
        )

    found = {"present": measure(plan.every_steps)}
    if math.isinf(between):
        return found
    young, daly = (formula(plan.checkpoint_seconds, between) for formula in (young_seconds, daly_seconds))
    # From a quarter to four times the formulas, on a logarithmic scale.
    sweep = (max(daly, young / 2) * 2 ** (n / 3) for n in range(-6, 7))
    intervals = (round(seconds / plan.step_seconds) for seconds in (young, daly, *sweep))
    losses = [measure(min(max(steps, 1), plan.total_steps)) for steps in intervals]
    best = min(losses[2:], key=lambda item: item.lost_share)
    return found | {"young": losses[0], "daly": losses[1], "simulated": best}
