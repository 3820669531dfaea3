"""One run from its first command to its end, with everything its plan does to it on the way.

Owns the waiting for moments and the patience with a run that does not get there.
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from tests.chaos.environment import Environment
from tests.chaos.faults import InjectedFault, inject
from tests.chaos.plan import ENDING, Fault, Moment, RunPlan
from tests.chaos.processes import Role

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

    injected: tuple[InjectedFault, ...]
    missed: tuple[Fault, ...]


def disturb(environment: Environment, plan: RunPlan) -> Course:
    """Start the run and do to it what the plan says; `finish` has it finished then."""
    injected, missed, after_attempt, resumes = list[InjectedFault](), list[Fault](), 0, False
    if plan.spoiled_step is not None:
        environment.spoil(plan.spoiled_step)
    environment.begin()
    for planned in plan.faults:
        # What was to make the run resume may have been missed or skipped.
        is_resume = planned.moment is Moment.RESUME
        fault = replace(planned, moment=Moment.STEP) if is_resume and not resumes else planned
        if not _comes(environment, fault, after_attempt):
            missed.append(fault)
            continue
        injected.append(inject(environment, fault))
        after_attempt, resumes = injected[-1].first_attempt, fault.kind in ENDING and not injected[-1].skipped
    return Course(injected=tuple(injected), missed=tuple(missed))


def finish(environment: Environment) -> None:
    """Have the run finished by who continues it, then by the command until it leaves with 0; raises `DoesNotEnd`."""
    deadline = time.monotonic() + _END_SECONDS
    while environment.observer.state().finished is None or environment.processes.of(Role.FLOW):
        if environment.observer.state().finished is None:
            environment.keep_going()
        if time.monotonic() > deadline:
            raise DoesNotEnd(f"not finished after {_END_SECONDS:.0f} s: {_last_words(environment)}")
        time.sleep(0.1)
    environment.dismiss_watcher()
    environment.next_variables = {}
    for _ in range(_LAST_COMMANDS):
        code = environment.train().process.wait(timeout=_END_SECONDS)
        if code == 0:
            return
    raise DoesNotEnd(f"the command left with {code} again and again: {_last_words(environment)}")


def _comes(environment: Environment, fault: Fault, after_attempt: int) -> bool:
    """Wait for the fault's moment; False where it will not come any more."""
    deadline, looked_after = time.monotonic() + _MOMENT_SECONDS, 0.0
    while time.monotonic() < deadline:
        if fault.moment is Moment.EVALUATION and environment.observer.has_committed(fault.step):
            return _evaluates(environment)
        if environment.observer.is_reached(fault, after_attempt):
            return True
        if _is_over(environment, fault):
            return False
        if time.monotonic() - looked_after > _LOOKED_AFTER_SECONDS:
            looked_after = time.monotonic()
            if environment.observer.state().finished is None:
                environment.keep_going()
        time.sleep(0.003 if environment.proxy is None else 0.2)  # looking costs the emulator time
    return False


def _evaluates(environment: Environment) -> bool:
    """Wait for an evaluator with the trainer halted, which is so much faster that it would be over before."""
    halted = environment.processes.send_signal(signal.SIGSTOP, Role.TRAINER)
    deadline = time.monotonic() + _EVALUATOR_SECONDS
    while not (evaluators := environment.processes.of(Role.EVALUATOR)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in halted:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return bool(evaluators)


def _is_over(environment: Environment, fault: Fault) -> bool:
    state = environment.observer.state()
    if fault.moment is Moment.START:
        return state.latest_attempt > 0
    if state.finished is None:
        is_rare = fault.moment in (Moment.COMMIT, Moment.SWEEP)
        return is_rare and environment.observer.has_trained(fault.step + _RARE_STEPS)
    return fault.moment is not Moment.PROMOTION or not environment.processes.of(Role.FLOW)


def _last_words(environment: Environment) -> str:
    if not environment.started:
        return "nothing was started"
    words = environment.started[-1].output.read_text(errors="replace")
    return words[-800:]
