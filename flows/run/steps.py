"""The five steps of the chain as a parameter: the caller of the chain chooses what executes them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from prefect import State, Task, states
from prefect.exceptions import Pause

from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks import commit_checkpoint, evaluate, promote, tokenize_and_split, train_segment
from cairn.tasks.data.snapshot_build import ProgressListener
from cairn.tasks.data.snapshot_lookup import SnapshotReference
from cairn.tasks.evaluator.evaluation_run import Measurement
from cairn.tasks.policy.termination import TerminationReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Five callables: the plain functions of the tasks, the tasks, or the functions with something that shows them."""

    tokenize_and_split: Callable[[tokenize_and_split.Text, ObjectStore, ProgressListener], SnapshotReference]
    train_segment: Callable[[train_segment.Segment, train_segment.Trainer], train_segment.Trained]
    commit_checkpoint: Callable[[commit_checkpoint.Commit, commit_checkpoint.WaitStaged, RunLog], CheckpointReference]
    evaluate: Callable[[Measurement, RunLog, Callable[[], bool]], evaluate.Evaluated]
    promote: Callable[[promote.Offer, RunLog], promote.OfferDecision]


def steps_by(execute: Callable[[Task[..., Any]], Callable[..., Any]]) -> Steps:
    """Return the steps, each executed as `execute` makes of its task."""
    return Steps(
        tokenize_and_split=execute(tokenize_and_split.tokenize_and_split),
        train_segment=execute(train_segment.train_segment),
        commit_checkpoint=execute(commit_checkpoint.commit_checkpoint),
        evaluate=execute(evaluate.evaluate),
        promote=execute(promote.promote),
    )


def as_task(step: Task[..., Any]) -> Callable[..., Any]:
    """Return the step as a task run of the flow run that this process is, which ends in the state that it deserves.

    Prefect shows it and decides nothing: the value or error is the function's, which runs even where the engine fails.
    """

    def perform(*arguments: Any) -> Any:
        values, errors = list[Any](), list[BaseException]()

        @wraps(step.fn)
        def function(*given: Any, **named: Any) -> State[Any]:
            try:
                values.append(step.fn(*given, **named))
            except BaseException as error:
                errors.append(error)
                raise
            return state_of(values[-1])

        task = Task(fn=function, name=step.name, task_run_name=step.task_run_name, persist_result=False)
        try:
            task(*arguments, return_state=True)
        except (Exception, Pause):  # a paused flow run commits and ends in order, not at the next task
            logging.getLogger(__name__).debug("Prefect could not show %s", step.name, exc_info=True)
        if errors:
            raise errors[-1]
        return values[-1] if values else step.fn(*arguments)

    return perform


def state_of(value: object) -> State[Any]:
    """Return how Prefect shows the value of a step: an early end of a segment is a failure named after its reason."""
    match value:
        case train_segment.Trained(failure=failure) if failure is not None:
            return states.Failed(name=failure.reason.state_name, message=failure.detail, data=value)
        case train_segment.Trained(done=done) if done is not None and done.stopped:
            name, message = TerminationReason.PREEMPTED.state_name, f"stopped at step {done.step}"
            return states.Failed(name=name, message=f"{message} by a notice", data=value)
        case evaluate.Interrupted(why=why):
            return states.Cancelled(message=why, data=value)
        case promote.OfferDecision(message=message, is_refused=is_refused):  # a refusal completes the step too
            return states.Completed(name="Refused" if is_refused else "Completed", message=message, data=value)
    return states.Completed(data=value)


PLAIN = steps_by(lambda step: step.fn)
TASKS = steps_by(as_task)
