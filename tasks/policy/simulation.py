"""A run through its failures on a clock that is not the wall's: what a policy makes of them, and what that costs.

Event by event, never step by step: a run of months takes as long as it has failures. What follows a failure is decided
by the policy over a growing `RunState` of receipts, as in a real run: for budgets that is `budgets.decide` itself.

From a failure to the first step of the next attempt (noticed, claimed, loaded) it takes `restart_seconds`, in which the
next failure may come. Failures come after device time, whatever the policy: one that a remedy would have prevented for
ever is not prevented here, and one that would return without its remedy does not; that flatters a plain retry count.

Refuses to know stores, files and randomness: failures come in as values.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from storage.logs.run_entries import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    DataQuarantined,
    Decision,
    Placement,
)
from storage.logs.run_state import AttemptRecord, CheckpointRecord, RunState
from tasks.configuration.settings import BudgetsConfig
from tasks.policy.budgets import FailureImpact, decide
from tasks.policy.failure_trace import TraceFailure
from tasks.policy.failures import Failure
from tasks.policy.simulated_attempt import SimulationPlan, Stretch, train_until
from tasks.policy.termination import DecisionAction, TerminationReason

MOST_ATTEMPTS = 10_000
_MEAN_JITTER = 0.5
_BEGINNING = datetime(2000, 1, 1, tzinfo=UTC)
_DATA_REASONS = frozenset({TerminationReason.BAD_DATA, TerminationReason.DIVERGED})


class Policy(Protocol):
    """What follows the end of the open attempt of `state`; `budgets.decide` with its budgets is one."""

    def __call__(self, state: RunState, failure: Failure, setback: FailureImpact) -> Decision:
        """Return what is done next."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRun:
    """How a run ended under a policy, and where its time went; `state` holds every receipt with its decision."""

    plan: SimulationPlan
    state: RunState
    step: int
    commits: int
    restart_seconds: float
    lost_seconds: float
    waiting_seconds: float
    is_finished: bool
    stopped_by: str | None

    @property
    def useful_seconds(self) -> float:
        """Wall seconds spent on steps that are committed."""
        return self.step * self.plan.step_seconds

    @property
    def checkpoint_seconds(self) -> float:
        """Wall seconds for which training stood still for commits."""
        return self.commits * self.plan.checkpoint_seconds

    @property
    def wall_seconds(self) -> float:
        """From the first step to the end."""
        spent = self.useful_seconds + self.checkpoint_seconds + self.restart_seconds
        return spent + self.lost_seconds + self.waiting_seconds

    @property
    def goodput(self) -> float:
        """Useful share of the wall time, 0 for a run that never began."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def wasted_gpu_hours(self) -> float:
        """Device-hours between a last commit and the failure after it: what the receipts call wasted."""
        return self.lost_seconds * self.plan.devices / 3600

    @property
    def retries(self) -> Mapping[str, int]:
        """Reason → how many attempts it ended that were followed by another."""
        ended = (attempt.ended for attempt in self.state.attempts)
        return Counter(
            receipt.reason for receipt in ended if receipt and receipt.decision.action == DecisionAction.RESUME
        )


def budget_policy(budgets: BudgetsConfig) -> Policy:
    """Return the policy of a real run with these budgets; waits are as long as their jitter makes them on average."""

    def policy(state: RunState, failure: Failure, setback: FailureImpact) -> Decision:
        return decide(budgets, state, failure, setback, jitter=_MEAN_JITTER)

    return policy


def plain_retries(most: int) -> Policy:
    """Return what an orchestrator's retry counter does: so many tries more in all, whatever happened."""

    def policy(state: RunState, failure: Failure, setback: FailureImpact) -> Decision:
        if len(state.attempts) > most:
            return Decision(
                action=DecisionAction.STOP, reason=f"{failure.reason} after {most} retries of whatever reason"
            )
        return Decision(action=DecisionAction.RESUME, reason=f"retry {len(state.attempts)} of {most}")

    return policy


def never_give_up(state: RunState, failure: Failure, setback: FailureImpact) -> Decision:
    """Resume after everything: for measuring what the interval alone costs."""
    return Decision(action=DecisionAction.RESUME, reason="always")


def simulate(plan: SimulationPlan, failures: Iterable[TraceFailure], policy: Policy) -> SimulatedRun:
    """Return the run's end: finished, stopped by the policy, or cut off after `MOST_ATTEMPTS`."""
    run = _begun(plan)
    sequence = iter(failures)
    while len(run.state.attempts) < MOST_ATTEMPTS:
        event = next(sequence, None)
        seconds = event.after_device_seconds / plan.devices if event else math.inf
        is_announced = event is not None and event.reason is TerminationReason.PREEMPTED
        restart = plan.restart_seconds if run.state.attempts else 0.0
        stretch = train_until(
            plan, first_step=run.step, restart_seconds=restart, failure_seconds=seconds, is_announced=is_announced
        )
        run = _after(run, stretch, event, policy)
        if run.is_finished or run.stopped_by is not None:
            return run
    return replace(run, stopped_by=f"cut off after {MOST_ATTEMPTS:,} attempts")


def _begun(plan: SimulationPlan) -> SimulatedRun:
    return SimulatedRun(
        plan=plan,
        state=RunState(),
        step=0,
        commits=0,
        restart_seconds=0.0,
        lost_seconds=0.0,
        waiting_seconds=0.0,
        is_finished=False,
        stopped_by=None,
    )


def _after(run: SimulatedRun, stretch: Stretch, event: TraceFailure | None, policy: Policy) -> SimulatedRun:
    """The run with one attempt more, its receipt and what was decided on it."""
    spent = replace(
        run,
        step=stretch.committed_step,
        commits=run.commits + stretch.commits,
        restart_seconds=run.restart_seconds + stretch.restart_seconds,
        lost_seconds=run.lost_seconds + stretch.lost_seconds,
        is_finished=stretch.is_finished,
    )
    opened = _with_attempt(run, spent, stretch)
    if event is None or stretch.is_finished:
        failure = Failure(reason=TerminationReason.COMPLETED, detail="the last step is committed", fingerprint="")
        finish = Decision(action=DecisionAction.FINISH, reason=failure.detail)
        return replace(spent, state=_with_receipt(opened, run, spent, stretch, failure, finish))
    failure, setback = _failure(event, stretch), _setback(event, stretch, run.plan, opened)
    decision = policy(opened, failure, setback)
    state = _with_receipt(opened, run, spent, stretch, failure, decision)
    if decision.action == DecisionAction.RESUME:
        state = _with_quarantine(state, failure, setback.quarantined_samples)
        return replace(spent, state=state, waiting_seconds=run.waiting_seconds + decision.delay_seconds)
    return replace(spent, state=state, stopped_by=f"{failure.reason}: {decision.reason or 'never retried'}")


def _failure(event: TraceFailure, stretch: Stretch) -> Failure:
    place = f" after step {stretch.last_step}" if event.reason is TerminationReason.HUNG else ""
    return Failure(reason=event.reason, detail=event.detail, fingerprint=event.fingerprint or f"{event.reason}{place}")


def _setback(event: TraceFailure, stretch: Stretch, plan: SimulationPlan, state: RunState) -> FailureImpact:
    """What it lost, and for the data's failures the samples of one step where the trace does not say how many."""
    samples = event.quarantined_samples
    if samples is None:
        samples = plan.global_batch if event.reason in _DATA_REASONS else 0
    started = state.attempts[-1].started
    return FailureImpact(
        last_step=stretch.last_step,
        micro_batch=started.micro_batch,
        wasted_gpu_seconds=stretch.lost_seconds * plan.devices,
        activation_checkpointing=started.activation_checkpointing,
        quarantined_samples=samples,
        repaired_objects=event.repaired_objects,
    )


def _with_attempt(run: SimulatedRun, spent: SimulatedRun, stretch: Stretch) -> RunState:
    """The state in which the attempt is decided on: open, with its newest commit. Older commits are superseded."""
    state, plan, number = run.state, run.plan, len(run.state.attempts) + 1
    last = state.attempts[-1] if state.attempts else None
    decided = last.ended.decision if last and last.ended else None
    micro_batch, recomputing = plan.micro_batch, False
    if last and decided:
        micro_batch = decided.micro_batch or last.started.micro_batch
        recomputing = decided.activation_checkpointing or last.started.activation_checkpointing
    started = AttemptStarted(
        attempt=number,
        placement=_placement(plan),
        config={},
        config_sha256="",
        code_version="",
        flow_run_id=None,
        micro_batch=micro_batch,
        resumed_from=state.checkpoints[-1].committed.reference if state.checkpoints else None,
        activation_checkpointing=recomputing,
        quarantined_samples=_quarantined(state),
    )
    progress = stretch.committed_step > run.step
    record = AttemptRecord(
        started=started,
        started_at=_at(run.wall_seconds),
        last_committed_step=stretch.committed_step if progress else None,
        made_progress=progress,
    )
    checkpoints = (_checkpoint(spent, number),) if progress else state.checkpoints
    return replace(state, attempts=(*state.attempts, record), checkpoints=checkpoints)


def _checkpoint(run: SimulatedRun, attempt: int) -> CheckpointRecord:
    committed = CheckpointCommitted(
        step=run.step,
        attempt=attempt,
        prefix=f"step-{run.step:08d}-attempt-{attempt:04d}",
        manifest_sha256="",
        state_sha256="",
        bytes=0,
        tokens=0,
        gpu_seconds=0.0,
    )
    return CheckpointRecord(committed=committed, committed_at=_at(run.wall_seconds))


def _with_receipt(
    state: RunState, run: SimulatedRun, spent: SimulatedRun, stretch: Stretch, failure: Failure, decision: Decision
) -> RunState:
    used = spent.useful_seconds + spent.checkpoint_seconds - run.useful_seconds - run.checkpoint_seconds
    ended = AttemptEnded(
        attempt=len(state.attempts),
        reason=failure.reason,
        detail=failure.detail,
        fingerprint=failure.fingerprint,
        last_step=stretch.last_step,
        tokens=0,
        gpu_seconds=(used + stretch.lost_seconds) * run.plan.devices,
        useful_gpu_seconds=used * run.plan.devices,
        wasted_gpu_seconds=stretch.lost_seconds * run.plan.devices,
        stderr_tail=(),
        decision=decision,
    )
    record = replace(state.attempts[-1], ended=ended, ended_at=_at(spent.wall_seconds))
    return replace(state, attempts=(*state.attempts[:-1], record))


def _with_quarantine(state: RunState, failure: Failure, samples: int) -> RunState:
    if not samples:
        return state
    first = _quarantined(state)
    quarantine = DataQuarantined(
        attempt=len(state.attempts),
        reason=failure.reason,
        windows=tuple(range(first, first + samples)),
        detail=failure.detail,
    )
    return replace(state, quarantines=(*state.quarantines, quarantine))


def _quarantined(state: RunState) -> int:
    return sum(len(item.windows) for item in state.quarantines)


def _placement(plan: SimulationPlan) -> Placement:
    return Placement(
        host="simulated",
        boot_id="",
        pid=1,
        process_started=0.0,
        device="simulated",
        world_size=plan.devices,
        threads=1,
    )


def _at(wall_seconds: float) -> datetime:
    return _BEGINNING + timedelta(seconds=wall_seconds)
