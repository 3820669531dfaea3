"""One run from its first command to its end, with everything its plan does to it on the way.

Owns the waiting for moments and the patience with a run that does not get there.
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from tests.chaos.cast import Role
from tests.chaos.plan import ENDING, Fault, Moment, RunPlan
from tests.chaos.scene import Scene
from tests.chaos.strikes import Strike, strike

_MOMENT_SECONDS = 90.0
_END_SECONDS = 240.0
_LOOKED_AFTER_SECONDS = 0.25
_LAST_COMMANDS = 4
_EVALUATOR_SECONDS = 20.0
_RARE_STEPS = 20
"""A moment that has not been seen within as many steps is given up, so that the next fault has its turn."""


class DoesNotEnd(AssertionError):
    """The run is not brought to its end by those who continue it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """What was done to a run, and which faults never saw their moment."""

    strikes: tuple[Strike, ...]
    missed: tuple[Fault, ...]


def disturb(scene: Scene, plan: RunPlan) -> Course:
    """Start the run and do to it what the plan says; `finish` has it finished then."""
    strikes, missed, after_attempt, resumes = list[Strike](), list[Fault](), 0, False
    if plan.spoiled_step is not None:
        scene.spoil(plan.spoiled_step)
    scene.begin()
    for planned in plan.faults:
        # What was to make the run resume may have been missed or skipped.
        is_resume = planned.moment is Moment.RESUME
        fault = replace(planned, moment=Moment.STEP) if is_resume and not resumes else planned
        if not _comes(scene, fault, after_attempt):
            missed.append(fault)
            continue
        strikes.append(strike(scene, fault))
        after_attempt, resumes = strikes[-1].first_attempt, fault.kind in ENDING and not strikes[-1].skipped
    return Course(strikes=tuple(strikes), missed=tuple(missed))


def finish(scene: Scene) -> None:
    """Have the run finished by who continues it, then by the command until it leaves with 0; raises `DoesNotEnd`."""
    deadline = time.monotonic() + _END_SECONDS
    while scene.observer.state().finished is None or scene.cast.of(Role.FLOW):
        if scene.observer.state().finished is None:
            scene.keep_going()
        if time.monotonic() > deadline:
            raise DoesNotEnd(f"not finished after {_END_SECONDS:.0f} s: {_last_words(scene)}")
        time.sleep(0.1)
    scene.dismiss_watcher()
    scene.next_environment = {}
    for _ in range(_LAST_COMMANDS):
        code = scene.train().process.wait(timeout=_END_SECONDS)
        if code == 0:
            return
    raise DoesNotEnd(f"the command left with {code} again and again: {_last_words(scene)}")


def _comes(scene: Scene, fault: Fault, after_attempt: int) -> bool:
    """Wait for the fault's moment; False where it will not come any more."""
    deadline, looked_after = time.monotonic() + _MOMENT_SECONDS, 0.0
    while time.monotonic() < deadline:
        if fault.moment is Moment.EVALUATION and scene.observer.has_committed(fault.step):
            return _evaluates(scene)
        if scene.observer.is_reached(fault, after_attempt):
            return True
        if _is_over(scene, fault):
            return False
        if time.monotonic() - looked_after > _LOOKED_AFTER_SECONDS:
            looked_after = time.monotonic()
            if scene.observer.state().finished is None:
                scene.keep_going()
        time.sleep(0.003 if scene.proxy is None else 0.2)  # looking costs the emulator time
    return False


def _evaluates(scene: Scene) -> bool:
    """Wait for an evaluator with the trainer halted, which is so much faster that it would be over before."""
    halted = scene.cast.strike(signal.SIGSTOP, Role.TRAINER)
    deadline = time.monotonic() + _EVALUATOR_SECONDS
    while not (evaluators := scene.cast.of(Role.EVALUATOR)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in halted:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return bool(evaluators)


def _is_over(scene: Scene, fault: Fault) -> bool:
    state = scene.observer.state()
    if fault.moment is Moment.START:
        return state.latest_attempt > 0
    if state.finished is None:
        is_rare = fault.moment in (Moment.COMMIT, Moment.SWEEP)
        return is_rare and scene.observer.has_trained(fault.step + _RARE_STEPS)
    return fault.moment is not Moment.PROMOTION or not scene.cast.of(Role.FLOW)


def _last_words(scene: Scene) -> str:
    if not scene.started:
        return "nothing was started"
    words = scene.started[-1].output.read_text(errors="replace")
    return words[-800:]
