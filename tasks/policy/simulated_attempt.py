"""One simulated attempt in closed form: how far it gets before its failure, and where its time goes.

A step and a commit take fixed times, and training stands still during a commit. A preemption comes with a notice: the
current step is finished and committed if `grace_seconds` allow it.
"""

import math
from dataclasses import dataclass, replace


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
        """Refuse sizes and times out of range."""
        for name in ("total_steps", "devices", "every_steps", "micro_batch", "global_batch", "step_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        for name in ("checkpoint_seconds", "restart_seconds", "grace_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative")

    @property
    def notice_saves_all(self) -> bool:
        """Whether the grace period is always long enough to finish a step and commit it."""
        return self.grace_seconds >= self.step_seconds + self.checkpoint_seconds


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
    plan: SimulationPlan, *, first_step: int, restart_seconds: float, failure_seconds: float, is_announced: bool
) -> Stretch:
    """Return an attempt from `first_step` until `failure_seconds` after its start, or until the run's end."""
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
    since = training - (step - first_step) * plan.step_seconds - commits * plan.checkpoint_seconds
    return _ended(plan, step, commits, restart_seconds, max(since, 0.0), is_announced)


def _ended(
    plan: SimulationPlan, step: int, commits: int, restart_seconds: float, since: float, is_announced: bool
) -> Stretch:
    """The part after the last commit: `since` seconds later it fails, or gets a notice."""
    boundary = min(plan.total_steps, (step // plan.every_steps + 1) * plan.every_steps)
    stretch = Stretch(committed_step=step, last_step=step, commits=commits, restart_seconds=restart_seconds)
    if is_announced:
        reached = min(step + math.ceil(since / plan.step_seconds), boundary)
        ready = (reached - step) * plan.step_seconds + plan.checkpoint_seconds
        if reached == step:
            return stretch
        if ready - since <= plan.grace_seconds:
            finished = reached == plan.total_steps
            return replace(
                stretch, committed_step=reached, last_step=reached, commits=commits + 1, is_finished=finished
            )
        since += plan.grace_seconds
    reached = min(step + int(since / plan.step_seconds), boundary)
    return replace(stretch, last_step=reached, lost_seconds=since)
