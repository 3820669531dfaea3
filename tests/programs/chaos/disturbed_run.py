"""One run from its first command to its end, with everything its plan does to it on the way.

Owns the waiting for moments and the patience with a run that does not get there.
"""

import time
from dataclasses import dataclass, replace

from tests.processes.waiting import patience_seconds, prompt_seconds
from tests.programs.chaos.environment import Environment
from tests.programs.chaos.faults import InjectedFault, inject
from tests.programs.chaos.kinds import ENDING, KILLS, Kind, Moment
from tests.programs.chaos.plan import EARLY_SECONDS, EVALUATED_STEPS, Fault, RunPlan
from tests.programs.chaos.processes import Role

_LOOKED_AFTER_SECONDS = 0.25
_LAST_COMMANDS = 4
_SLICED = frozenset({Moment.COMMIT, Moment.EVALUATION, Moment.SWEEP, Moment.PROMOTION})
_SLICE_SECONDS = 0.002
_EVALUATOR_SECONDS = 10.0
"""So long after its checkpoint an evaluator is there or was missed; a halted trainer is taken for hung much later."""
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
    injected, missed, after_attempt, resumes = list[InjectedFault](), list[Fault](), 0, True
    if plan.spoiled_step is not None:
        environment.spoil(plan.spoiled_step)
    environment.begin()
    for planned in plan.faults:
        # What was to make the run resume, or a command start, may have been missed or skipped.
        needs_start = planned.moment in (Moment.RESUME, Moment.EARLY)
        fault = replace(planned, moment=Moment.STEP) if needs_start and not resumes else planned
        if fault.kind is Kind.KILL_OWN_SERVER:
            _await_own_server(environment)
        came = _comes(environment, fault, after_attempt)
        if not came and fault.moment is Moment.EARLY:  # the start went by between two looks
            fault = replace(fault, moment=Moment.STEP)
            came = _comes(environment, fault, after_attempt)
        if not came:
            missed.append(fault)
            environment.leave_alone(f"{fault.kind}, which never came")
            continue
        after_attempt = environment.observer.state().latest_attempt
        injected.append(_inject_while_halted(environment, fault))
        resumes = fault.kind in ENDING and not injected[-1].skipped
    return Course(injected=tuple(injected), missed=tuple(missed))


def finish(environment: Environment) -> None:
    """Have the run finished by who continues it, then by the command until it leaves with 0; raises `DoesNotEnd`."""
    patience = patience_seconds()
    deadline = time.monotonic() + patience
    while environment.observer.state().finished is None or environment.processes.of(Role.FLOW):
        environment.exits()
        if environment.observer.state().finished is None:
            environment.keep_going()
        if time.monotonic() > deadline:
            raise DoesNotEnd(f"not finished after {patience:.0f} s: {_last_words(environment)}")
        time.sleep(0.1)
    environment.dismiss_watcher()
    if environment.proxy is not None:
        environment.proxy.deliver()
    environment.next_variables = {}
    for _ in range(_LAST_COMMANDS):
        code = environment.train().process.wait(timeout=patience)
        environment.exits()
        if code == 0:
            return
    raise DoesNotEnd(f"the command left with {code} again and again: {_last_words(environment)}")


def _comes(environment: Environment, fault: Fault, after_attempt: int) -> bool:
    """Wait for the fault's moment; False where it will not come any more."""
    deadline, looked_after = time.monotonic() + patience_seconds(), 0.0
    evaluated = _next_evaluation(fault.step)
    while time.monotonic() < deadline:
        if fault.moment is Moment.EVALUATION and environment.observer.has_committed(evaluated):
            if _evaluates(environment):
                return True
            evaluated = _next_evaluation(environment.observer.trained_step(environment.observer.state()) + 1)
        elif environment.observer.is_reached(fault, after_attempt):
            return True
        environment.wake()
        if _is_over(environment, fault):
            return False
        starts = fault.moment is Moment.EARLY and environment.processes.of(Role.FLOW)
        if (
            time.monotonic() - looked_after > _LOOKED_AFTER_SECONDS and not starts
        ):  # a look may take longer than a start
            looked_after = time.monotonic()
            environment.exits()
            if environment.observer.state().finished is None:
                environment.keep_going()
        if _is_near(environment, fault):
            time.sleep(_SLICE_SECONDS)
            environment.halt(Role.FLOW)
        else:
            is_cheap = environment.proxy is None or fault.moment is Moment.EARLY
            time.sleep(0.003 if is_cheap else 0.2)  # looking costs the emulator time
    environment.wake()
    return False


def _next_evaluation(step: int) -> int:
    """Return the first step from this one on whose checkpoint is evaluated."""
    return -(-step // EVALUATED_STEPS) * EVALUATED_STEPS


def _is_near(environment: Environment, fault: Fault) -> bool:
    """Whether the flow's next steps decide: it is then run in slices and looked at while it is halted."""
    if fault.moment not in _SLICED:
        return False
    state = environment.observer.state()
    before = EVALUATED_STEPS // 2 if fault.moment is Moment.EVALUATION else 1  # it may pass between two looks
    return state.finished is not None or environment.observer.trained_step(state) >= fault.step - before


def _inject_while_halted(environment: Environment, fault: Fault) -> InjectedFault:
    """Inject the fault; a process that is killed is halted until then, so that the moment cannot pass."""
    if fault.kind not in KILLS:
        environment.wake()
    try:
        return inject(environment, fault)
    finally:
        environment.wake()
        environment.leave_alone(fault.kind)


def _await_own_server(environment: Environment) -> None:
    """Halt the trainer until the command has a server: one that was killed comes back later than the next moment."""
    deadline = time.monotonic() + prompt_seconds()
    while not environment.processes.of(Role.SERVER) and time.monotonic() < deadline:
        if environment.observer.state().finished is not None:
            break
        environment.halt(Role.TRAINER)
        environment.keep_going()
        time.sleep(0.02)
    environment.wake()


def _evaluates(environment: Environment) -> bool:
    """Halt an evaluator as soon as there is one, and the trainer, which is much faster; False if it was missed."""
    environment.wake()  # the flow, which starts it
    environment.halt(Role.TRAINER)
    deadline = time.monotonic() + _EVALUATOR_SECONDS
    while time.monotonic() < deadline:
        halted = environment.halt(Role.EVALUATOR)
        if any(actor.pid in halted for actor in environment.processes.of(Role.EVALUATOR)):  # it had not ended before
            return True
        time.sleep(0.005)
    return False


def _is_over(environment: Environment, fault: Fault) -> bool:
    if fault.moment is Moment.EARLY:  # a start that took place is over; one that has yet to come is waited for
        commands = environment.processes.of(Role.FLOW)
        is_finished = not commands and environment.observer.state().finished is not None
        return is_finished or any(one.age_seconds > EARLY_SECONDS for one in commands)
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
