"""The decisions about a set of runs: which one is trained next, how far, and which are dropped on the way.

Pure functions of the runs' logs, so that a command that was killed decides the same again. Successive halving: at each
rung the runs with the lowest held-out losses go on. Source: Jamieson and Talwalkar 2016, "Non-stochastic Best Arm
Identification and Hyperparameter Optimization".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cairn.storage.logs.run_state import RunState
from cairn.tasks.configuration import run_configuration, settings
from cairn.tasks.policy import early_stop
from cairn.tasks.policy.termination import RESTARTABLE, DecisionAction, TerminationReason
from cairn.tasks.text.format import short_digest

RULE = "set.halving"
"""The rule by which a dropped run is finished, as its log names it."""
_MAY_GO_ON = frozenset({*RESTARTABLE, TerminationReason.FENCED, TerminationReason.STORAGE})
"""Ends that say nothing about the run itself: the same command tries it again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """A step at which runs are dropped, and how many go on."""

    step: int
    kept: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimit:
    """How far a run is trained now: to a step and for so much device time; `why` it pauses there."""

    until_step: float = math.inf
    device_seconds: float = math.inf
    why: str = ""


NO_LIMIT = RunLimit()


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run's part in a set: by step its held-out loss, as a number and in words.

    Up to step `settled` no other loss will come: infinite for a run that is over, 0 while an attempt is open. One that
    failed or was dropped has no losses.
    """

    step: int = 0
    attempts: int = 0
    device_seconds: float = 0.0
    losses: Mapping[int, tuple[float, str]] = field(default_factory=dict)
    settled: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the run is trained no further."""
        return math.isinf(self.settled)

    def measure(self, step: int) -> tuple[float, str] | None:
        """Return the loss by which a rung ranks the run, the last one up to its step; None while it may still come."""
        if step > self.settled:
            return None
        last = max((at for at in self.losses if at <= step), default=0)
        return self.losses.get(last, (math.inf, f"no evaluation up to step {step}"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """The next thing to do with the run at `place`: train it to a step, or finish it there by `stop`."""

    place: int
    until_step: int
    why: str = ""
    stop: early_stop.Stop | None = None


def plan_rungs(runs: int, *, factor: int, total_steps: int, interval: int) -> tuple[Rung, ...]:
    """Return the rungs of a set, each with `factor` times the steps of the one before and a `factor`-th of its runs.

    They lie at multiples of `interval`, where evaluations are due; of several at one step the last one counts.
    """
    rungs, kept, share = dict[int, int](), runs, 1
    while share < runs:
        share *= factor
    while share > 1:
        kept, step = math.ceil(kept / factor), math.ceil(total_steps / share / interval) * interval
        rungs, share = rungs | {step: kept}, share // factor
    return tuple(Rung(step=step, kept=kept) for step, kept in rungs.items() if step < total_steps)


def read_trial(state: RunState, suite_sha256: str) -> Trial:
    """Return what the log of a run says about its part in a set; only the first evaluation of a checkpoint counts."""
    first, ends = early_stop.first_results(state, suite_sha256), [item.ended for item in state.attempts if item.ended]
    line = {item.committed.step: item.committed.manifest_sha256 for item in state.surviving_checkpoints}
    losses, settled = dict[int, tuple[float, str]](), float(state.reached_step if state.open_attempt is None else 0)
    for step, manifest in line.items():
        if (found := first.get(manifest)) is not None:
            loss, of = found.metrics.get(settings.METRIC, math.nan), f"{found.suite} of step {step}"
            words = f"held-out loss {loss:.4f} ({of}, manifest {short_digest(manifest)})"
            losses[step] = (math.inf if math.isnan(loss) else loss, words)
    if len(losses) < len(line):
        terms = early_stop.StopTerms(state.attempts[-1].started.config, suite_sha256)
        settled = min([settled, *(item.committed.step - 1 for item in early_stop.outstanding(state, terms))])
    ended = ends[-1] if ends and state.open_attempt is None else None
    has_failed = ended and ended.decision.action == DecisionAction.STOP and ended.reason not in _MAY_GO_ON
    return Trial(
        step=state.high_water_step,
        attempts=state.latest_attempt,
        device_seconds=sum(item.gpu_seconds for item in ends),
        losses={} if (state.finished.rule == RULE if state.finished else has_failed) else losses,
        settled=math.inf if state.finished or has_failed else settled,
    )


def next_move(trials: Sequence[Trial], rungs: Sequence[Rung], total_steps: int) -> Move | None:
    """Return what is done next with a set of runs, None if nothing is; without rungs each run is trained to its end.

    Runs of one loss go on in the order in which the set names them.
    """
    left = list(range(len(trials)))
    for number, rung in enumerate(rungs, start=1):
        named, best = f"rung {number} of {len(rungs)}", f"the best {rung.kept} of {len(left)} runs"
        ranked = list[tuple[float, int, str]]()
        for place in left:
            if (found := trials[place].measure(rung.step)) is None:
                return Move(place=place, until_step=rung.step, why=f"waits for {named}: {best} of its set go on")
            ranked.append((found[0], place, found[1]))
        ranked.sort()
        for _, place, words in ranked[rung.kept :]:
            if not trials[place].is_over:
                why = f"it lost at {named}: {words} is not among {best}, which go on"
                stop = early_stop.Stop(step=rung.step, rule=RULE, why=why)
                return Move(place=place, until_step=rung.step, stop=stop)
        left = sorted(place for _, place, _ in ranked[: rung.kept])
    move = (Move(place=place, until_step=total_steps) for place in left if not trials[place].is_over)
    return next(move, None)


def find_limit(move: Move, trials: Sequence[Trial], rules: run_configuration.SetConfig) -> RunLimit | None:
    """Return how far the run of a move may be trained within the budget of the set, None where that is spent."""
    step, why = trials[move.place].step, move.why
    steps = (rules.steps or math.inf) - sum(trial.step for trial in trials)
    seconds = 3600 * (rules.device_hours or math.inf) - sum(trial.device_seconds for trial in trials)
    if step < move.until_step and min(steps, seconds) <= 0:
        return None
    if step + steps < move.until_step:
        why = f"its set has spent set.steps = {rules.steps}"
    elif seconds < math.inf:
        why = f"{why}{' or ' if why else ''}its set has spent set.device_hours = {rules.device_hours:g}"
    return RunLimit(until_step=min(step + steps, move.until_step), device_seconds=seconds, why=why)
