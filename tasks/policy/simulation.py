"""Simulation of a run through a sequence of failures under a retry policy, on a simulated clock.

It advances from failure to failure, never step by step. What follows a failure is decided on a growing `RunState` of
receipts, for budgets by the real `budgets.decide`. A restart takes `restart_seconds`, in which the next failure may
come. Failures do not depend on the policy: a remedy neither prevents a later failure nor does its absence repeat one.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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
    """Decides what follows the end of the open attempt of `state`."""

    def __call__(self, state: RunState, failure: Failure, impact: FailureImpact) -> Decision:
        """Return the decision."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRun:
    """How a run ended under a policy and where its time went; `state` has every receipt with its decision."""

    plan: SimulationPlan
    state: RunState = field(default_factory=RunState)
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
    def wasted_gpu_hours(self) -> float:
        """Device-hours between a last commit and the failure after it."""
        return self.lost_seconds * self.plan.devices / 3600

    @property
    def retries(self) -> Mapping[str, int]:
        """Reason → number of attempts that it ended and another one followed."""
        ended = (attempt.ended for attempt in self.state.attempts)
        return Counter(
            receipt.reason for receipt in ended if receipt and receipt.decision.action == DecisionAction.RESUME
        )


def budget_policy(budgets: BudgetsConfig) -> Policy:
    """Return the policy of a real run with these budgets, with delays of average jitter."""

    def policy(state: RunState, failure: Failure, impact: FailureImpact) -> Decision:
        return decide(budgets, state, failure, impact, jitter=_MEAN_JITTER)

    return policy


def plain_retries(most: int) -> Policy:
    """Return the policy of a plain retry counter: at most `most` retries in total, for any reason."""

    def policy(state: RunState, failure: Failure, impact: FailureImpact) -> Decision:
        if len(state.attempts) > most:
            return Decision(action=DecisionAction.STOP, reason=f"{failure.reason} after {most} retries for any reason")
        return Decision(action=DecisionAction.RESUME, reason=f"retry {len(state.attempts)} of {most}")

    return policy


def simulate(plan: SimulationPlan, failures: Iterable[TraceFailure], policy: Policy) -> SimulatedRun:
    """Return the run at its end: finished, stopped by the policy, or cut off after `MOST_ATTEMPTS`."""
    run = SimulatedRun(plan=plan)
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


def _after(run: SimulatedRun, stretch: Stretch, event: TraceFailure | None, policy: Policy) -> SimulatedRun:
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
    failure, impact = _failure(event, stretch), _impact(event, stretch, run.plan, opened)
    decision = policy(opened, failure, impact)
    state = _with_receipt(opened, run, spent, stretch, failure, decision)
    if decision.action == DecisionAction.RESUME:
        state = _with_quarantine(state, failure, impact.quarantined_samples)
        return replace(spent, state=state, waiting_seconds=run.waiting_seconds + decision.delay_seconds)
    return replace(spent, state=state, stopped_by=f"{failure.reason}: {decision.reason or 'never retried'}")


def _failure(event: TraceFailure, stretch: Stretch) -> Failure:
    place = f" after step {stretch.last_step}" if event.reason is TerminationReason.HUNG else ""
    return Failure(reason=event.reason, detail=event.detail, fingerprint=event.fingerprint or f"{event.reason}{place}")


def _impact(event: TraceFailure, stretch: Stretch, plan: SimulationPlan, state: RunState) -> FailureImpact:
    """For failures in the data, the samples of one step unless the trace gives a number."""
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
    """The state with the attempt open and its newest commit; older commits are superseded."""
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
        host="simulated", boot_id="", pid=1, process_started=0.0, device="simulated", world_size=plan.devices, threads=1
    )


def _at(wall_seconds: float) -> datetime:
    return _BEGINNING + timedelta(seconds=wall_seconds)
