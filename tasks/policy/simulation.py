"""Simulation of a run through a sequence of failures under a retry policy, from failure to failure in closed form.

A step, a commit and a restart take fixed times; training stands still during a commit. A policy decides on a growing
`RunState` of receipts, for budgets by the real `budgets.decide`. Failures do not depend on the policy.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

from cairn.storage.logs import run_entries, run_log, run_state
from cairn.storage.logs.run_entries import DataQuarantined, Decision
from cairn.tasks.configuration.settings import BudgetsConfig
from cairn.tasks.policy.attempt_sizes import lighter_sizes, sizes_of
from cairn.tasks.policy.budgets import FailureImpact, decide
from cairn.tasks.policy.failure_trace import TraceFailure
from cairn.tasks.policy.failures import Failure
from cairn.tasks.policy.termination import DecisionAction, TerminationReason

MOST_ATTEMPTS = 10_000
_TIME = datetime(2000, 1, 1, tzinfo=UTC)
"""Every time in the state; no policy reads one."""
Policy = Callable[[run_state.RunState, Failure, FailureImpact], Decision]
"""Decides what follows the end of the open attempt of a state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationPlan:
    """What is trained, on how many devices, and how long each part takes."""

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
class Stretch:
    """How far one attempt got and where its wall time went, in seconds."""

    committed_step: int
    last_step: int
    restart_seconds: float
    commits: int = 0
    lost_seconds: float = 0.0
    is_finished: bool = False


def train_until(
    plan: SimulationPlan, failure: TraceFailure | None, *, first_step: int, restart_seconds: float
) -> Stretch:
    """Return an attempt from `first_step` until its failure, or until the run's end.

    After the last commit it fails, or gets a notice of a preemption and commits in its grace.
    """
    failure_seconds = failure.after_device_seconds / plan.devices if failure else math.inf
    if failure_seconds < restart_seconds:
        return Stretch(committed_step=first_step, last_step=first_step, restart_seconds=failure_seconds)
    every, last = plan.every_steps, plan.total_steps
    behind = first_step // every
    all_commits = -(-last // every) - behind
    training = failure_seconds - restart_seconds
    if training >= (last - first_step) * plan.step_seconds + all_commits * plan.checkpoint_seconds:
        return Stretch(
            committed_step=last, last_step=last, commits=all_commits, restart_seconds=restart_seconds, is_finished=True
        )
    first_end = (min(last, (behind + 1) * every) - first_step) * plan.step_seconds + plan.checkpoint_seconds
    whole = every * plan.step_seconds + plan.checkpoint_seconds
    commits = 0 if training < first_end else min(1 + int((training - first_end) / whole), all_commits - 1)
    step = (behind + commits) * every if commits else first_step
    since = max(training - (step - first_step) * plan.step_seconds - commits * plan.checkpoint_seconds, 0.0)
    boundary = min(last, (step // every + 1) * every)
    stretch = Stretch(committed_step=step, last_step=step, commits=commits, restart_seconds=restart_seconds)
    if failure is not None and failure.reason is TerminationReason.PREEMPTED:
        reached = min(step + math.ceil(since / plan.step_seconds), boundary)
        if reached == step:
            return stretch
        if (reached - step) * plan.step_seconds + plan.checkpoint_seconds - since <= plan.grace_seconds:
            is_last = reached == last
            return replace(stretch, committed_step=reached, last_step=reached, commits=commits + 1, is_finished=is_last)
        since += plan.grace_seconds
    return replace(stretch, last_step=min(step + int(since / plan.step_seconds), boundary), lost_seconds=since)


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
        stretch = train_until(plan, event, first_step=run.step, restart_seconds=restart)
        run = _after(run, stretch, event, policy)
        if run.is_finished or run.stopped_by is not None:
            return run
    return replace(run, stopped_by=f"cut off after {MOST_ATTEMPTS:,} attempts")


def _after(run: SimulatedRun, stretch: Stretch, event: TraceFailure | None, policy: Policy) -> SimulatedRun:
    spent = replace(
        run,
        step=stretch.committed_step,
        commits=run.commits + stretch.commits,
        restart_seconds=run.restart_seconds + stretch.restart_seconds,
        lost_seconds=run.lost_seconds + stretch.lost_seconds,
        is_finished=stretch.is_finished,
    )
    opened = _with_attempt(run, stretch)
    if event is None or stretch.is_finished:
        failure = Failure(reason=TerminationReason.COMPLETED, detail="the last step is committed", fingerprint="")
        finish = Decision(action=DecisionAction.FINISH, reason=failure.detail)
        return replace(spent, state=_with_receipt(opened, run, stretch, failure, finish))
    place = f" after step {stretch.last_step}" if event.reason is TerminationReason.HUNG else ""
    fingerprint = event.fingerprint or f"{event.reason}{place}"
    failure = Failure(reason=event.reason, detail=event.detail, fingerprint=fingerprint)
    impact = _impact(event, stretch, run.plan, opened)
    decision = policy(opened, failure, impact)
    state = _with_receipt(opened, run, stretch, failure, decision)
    if decision.action != DecisionAction.RESUME:
        return replace(spent, state=state, stopped_by=f"{failure.reason}: {decision.reason or 'never retried'}")
    if samples := impact.quarantined_samples:
        first = sum(len(item.windows) for item in state.quarantines)
        windows, attempt = tuple(range(first, first + samples)), len(state.attempts)
        entry = DataQuarantined(attempt=attempt, reason=failure.reason, windows=windows, detail=failure.detail)
        state = replace(state, quarantines=(*state.quarantines, entry))
    waited = max(decision.delay_seconds, event.replacement_seconds)
    return replace(spent, state=state, waiting_seconds=run.waiting_seconds + waited)


def _impact(event: TraceFailure, stretch: Stretch, plan: SimulationPlan, state: run_state.RunState) -> FailureImpact:
    """For failures in the data, the samples of one step unless the trace gives a number."""
    is_in_data = event.reason in (TerminationReason.BAD_DATA, TerminationReason.DIVERGED)
    samples, sizes = event.quarantined_samples, sizes_of(state.attempts[-1].started)
    return FailureImpact(
        last_step=stretch.last_step,
        sizes=sizes,
        lighter=next(iter(lighter_sizes(sizes, global_batch=plan.global_batch)), None),
        wasted_gpu_seconds=stretch.lost_seconds * plan.devices,
        quarantined_samples=(plan.global_batch if is_in_data else 0) if samples is None else samples,
        repaired_objects=("an object",) * event.repaired_objects,
    )


def _with_attempt(run: SimulatedRun, stretch: Stretch) -> run_state.RunState:
    """The state with the attempt open and its newest commit; older commits are superseded."""
    state, plan, number = run.state, run.plan, len(run.state.attempts) + 1
    last = state.attempts[-1] if state.attempts else None
    decided = last.ended.decision if last and last.ended else None
    micro_batch, recomputing = plan.micro_batch, False
    if last and decided:
        micro_batch = decided.micro_batch or last.started.micro_batch
        recomputing = decided.activation_checkpointing or last.started.activation_checkpointing
    started = run_entries.AttemptStarted(
        attempt=number,
        placement=run_entries.Placement(
            host="", boot_id="", pid_namespace="", pid=1, start_ticks=0, device="", world_size=plan.devices, threads=1
        ),
        config={},
        config_sha256="",
        code_version="",
        flow_run_id=None,
        micro_batch=micro_batch,
        resumed_from=state.newest_committed.committed.reference if state.newest_committed else None,
        activation_checkpointing=recomputing,
    )
    step, progress = stretch.committed_step, stretch.committed_step > run.step
    record = run_state.AttemptRecord(
        started=started, started_at=_TIME, last_committed_step=step if progress else None, made_progress=progress
    )
    state = replace(state, attempts=state.attempts.append(record))
    if not progress:
        return state
    committed = run_entries.CheckpointCommitted(
        step=step,
        attempt=number,
        prefix=f"step-{step:08d}-attempt-{number:04d}",
        manifest_sha256="",
        state_sha256="",
        bytes=0,
        tokens=0,
        gpu_seconds=0.0,
    )
    commits = (run_state.CheckpointRecord(committed=committed, committed_at=_TIME),)
    return replace(state, live_checkpoints=commits, high_water_step=step, charges=run_log.refill(state.charges))


def _with_receipt(
    state: run_state.RunState, run: SimulatedRun, stretch: Stretch, failure: Failure, decision: Decision
) -> run_state.RunState:
    plan, steps = run.plan, stretch.committed_step - run.step
    used = steps * plan.step_seconds + stretch.commits * plan.checkpoint_seconds
    ended = run_entries.AttemptEnded(
        attempt=len(state.attempts),
        reason=failure.reason,
        detail=failure.detail,
        fingerprint=failure.fingerprint,
        last_step=stretch.last_step,
        tokens=0,
        gpu_seconds=(used + stretch.lost_seconds) * plan.devices,
        useful_gpu_seconds=used * plan.devices,
        wasted_gpu_seconds=stretch.lost_seconds * plan.devices,
        stderr_tail=(),
        decision=decision,
    )
    return run_log.end_attempt(state, ended, _TIME)
