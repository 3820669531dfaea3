"""The decision of `watch-runs`: a pure function from a run's log and one watcher's observations to what it does.

Times are the watcher's monotonic clock's. A wrong answer costs a useless start: the claim admits one trainer.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import partial

from cairn.storage.logs.run_state import AttemptRecord, RunState
from cairn.tasks.configuration import settings, stored_configuration
from cairn.tasks.policy.termination import DecisionAction, TerminationReason

_SCHEDULERS = ("slurm ", "kubernetes ")
"""With these begins the name of a scheduler that restarts a job itself, so that a second one would train elsewhere."""


class Life(Enum):
    """Whether a process runs; on another host that is unknown."""

    GONE = "gone"
    HERE = "here"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """One watcher's observations of a run.

    `owner` is the process of the newest attempt, or the process that opened a run without attempts. `unchanged_since`
    is when this watcher first saw the present attempt with the present heartbeat, or its end. `shows_life` means that
    heartbeat or commits changed since the last poll. `futile` counts continuations started since then, the last at
    `tried_at`. `unoffered_to` is the alias to which a finished run's best checkpoint was never offered. `attempt` and
    `mark` are the state that was seen.
    """

    owner: Life
    unchanged_since: float
    attempt: int = 0
    mark: str = ""
    shows_life: bool = False
    futile: int = 0
    tried_at: float = 0.0
    unoffered_to: str = ""


class WatchAction(StrEnum):
    """The action of a poll on a run."""

    CONTINUED = "continued"
    WAITS = "waits"
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchDecision:
    """Continue the run now, leave it alone, or wait and poll again at `until`, on the watcher's monotonic clock."""

    action: WatchAction
    why: str
    until: float = 0.0


_continue = partial(WatchDecision, action=WatchAction.CONTINUED)
_wait = partial(WatchDecision, action=WatchAction.WAITS)
_leave = partial(WatchDecision, action=WatchAction.LEFT)


def decide_watch(state: RunState, observed: Observed, now: float) -> WatchDecision:
    """Return what a watcher does with one run at `now`; one of a scheduler or of several machines it leaves alone."""
    decision = _decide(state, observed, now)
    started = state.attempts[-1].started.placement if state.attempts else state.opened
    if started is None or decision.action is WatchAction.LEFT:
        return decision
    if (by := started.continued_by).startswith(_SCHEDULERS):
        return _leave(why=f"{decision.why}; {by} continues it; if that is gone, a person does with the same command")
    if (wanted := started.nodes_wanted) > 1:
        alone = f"it wants {wanted} machines and a watcher has one: give the same command on each of them"
        return _leave(why=f"{decision.why}; {alone}")
    if decision.action is WatchAction.CONTINUED and observed.futile:
        until = observed.tried_at + min(900.0, 30.0 * 4.0 ** min(observed.futile - 1, 8))
        if now < until:
            return _wait(until=until, why=f"{decision.why}; continued {observed.futile} time(s) and not yet claimed")
    return decision


def is_over(state: RunState, observed: Observed) -> bool:
    """Whether nothing is left to do for a run until a person continues it."""
    ended = state.attempts[-1].ended if state.attempts else None
    if ended is None or observed.unoffered_to:
        return False
    is_left = ended.reason == TerminationReason.CANCELLED or ended.decision.action != DecisionAction.RESUME
    return is_left or state.finished is not None or state.deleted is not None


def lease_seconds(state: RunState) -> float:
    """Return how long the newest attempt's heartbeat may stay the same before it counts as lost."""
    if not state.attempts:
        return settings.LeaseConfig().seconds
    return stored_configuration.parse_stored_configuration(state.attempts[-1].started.config).lease.seconds


def _decide(state: RunState, observed: Observed, now: float) -> WatchDecision:
    if state.opened is None:
        return _leave(why="nothing was opened here")
    if state.deleted is not None:
        return _leave(why=state.closed_to_training())
    if not state.attempts:
        if state.origin is not None:
            return _leave(why=f"forked and never started; `cairn train --run-id {state.opened.run_id}` starts it")
        if observed.owner is Life.GONE:
            return _continue(why="opened but never claimed, and the process that opened it is gone")
        whose = "is still working" if observed.owner is Life.HERE else "may still be working on another host"
        return _leave(why=f"opened but never claimed: the process that opened it {whose}")
    if state.open_attempt is not None:
        return _open(state, state.open_attempt, observed, now)
    if state.finished is not None:
        how = f"finished at step {state.finished.step}"
        if not observed.unoffered_to:
            return _leave(why=how)
        how = f"{how}, its best checkpoint not yet offered to {observed.unoffered_to}"
        if observed.owner is Life.HERE:
            return _leave(why=f"{how}: its process is alive")
        until = observed.unchanged_since
        if observed.owner is Life.UNKNOWN:  # its process may still work on the last evaluation
            stored = stored_configuration.parse_stored_configuration(state.attempts[-1].started.config)
            until += stored.lease.seconds + stored.evaluation.timeout_seconds
        return _continue(why=how) if now >= until else _wait(until=until, why=f"{how}; its own process may still do so")
    return _ended(state, state.attempts[-1], observed, now)


def _open(state: RunState, owner: AttemptRecord, observed: Observed, now: float) -> WatchDecision:
    placement, number = owner.started.placement, owner.started.attempt
    whose = f"attempt {number} (process {placement.pid} on {placement.host})"
    silent, lease = now - observed.unchanged_since, lease_seconds(state)
    if observed.owner is Life.GONE:
        return _continue(why=f"{whose} is gone without a receipt")
    if observed.owner is Life.HERE:
        quiet = ", but silent for longer than its lease: stop that process if it hangs" if silent > lease else ""
        return _leave(why=f"{whose} is alive{quiet}")
    if observed.shows_life:
        return _leave(why=f"{whose} shows life")
    if silent >= lease:
        return _continue(why=f"{whose} has been silent for its whole lease of {lease:.0f} s")
    return _wait(until=observed.unchanged_since + lease, why=f"{whose} is lost if it stays silent for {lease:.0f} s")


def _ended(state: RunState, last: AttemptRecord, observed: Observed, now: float) -> WatchDecision:
    ended = last.ended
    assert ended is not None
    whose, decision = f"attempt {ended.attempt} ended: {ended.reason}", ended.decision
    if ended.reason == TerminationReason.CANCELLED:
        return _leave(why=f"{whose}; a person stopped it, so a person continues it")
    if decision.action != DecisionAction.RESUME:
        return _leave(why=f"{whose}; a person decides: {decision.reason}")
    leaves = ended.reason == TerminationReason.PREEMPTED  # any other end is followed up by the process that saw it
    if observed.owner is Life.HERE:
        return _leave(why=f"{whose}; its process {'is exiting' if leaves else 'is alive and continues'}")
    may_go_on = lease_seconds(state) if observed.owner is Life.UNKNOWN and not leaves else 0.0
    until = observed.unchanged_since + decision.delay_seconds + may_go_on
    if now >= until:
        return _continue(why=whose)
    what = "back-off" if decision.delay_seconds else "time in which its own process may continue"
    return _wait(until=until, why=f"{whose}; the {what} is not yet over")
