"""The five steps of the chain as a parameter: the caller of the chain chooses what executes them."""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from prefect import State, Task, states
from prefect.client.schemas.objects import StateDetails
from prefect.exceptions import Pause

from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks import commit_checkpoint, evaluate, promote, tokenize_and_split, train_segment
from cairn.tasks.data.snapshot_build import ProgressListener
from cairn.tasks.data.snapshot_lookup import SnapshotReference
from cairn.tasks.evaluator.evaluation_run import Measurement
from cairn.tasks.policy.termination import TerminationReason

MOST_TASK_RUNS = 60


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


class Chain:
    """The task runs of one flow run, each after those that it needs: at most as many as Prefect's graph can show.

    The steps before a step are named here alone, since Prefect would also take each object that a task has returned for
    an edge. A step that failed or was refused blocks none.
    """

    def __init__(self) -> None:
        self._shown = dict[tuple[str, int], list[UUID]]()
        self._newest_segment: list[UUID] = []
        self._left = MOST_TASK_RUNS

    def admit(self, step: Task[..., Any]) -> bool:
        """Whether one more is shown; the last place is kept for the promotion."""
        if self._left <= (step.name != promote.promote.name):
            return False
        self._left -= 1
        return True

    def before(self, record: object) -> list[UUID]:
        """Return the task runs of the steps that come right before the one of this record."""
        match record:
            case train_segment.Segment():
                return self._newest_segment
            case commit_checkpoint.Commit(done=done):
                return self._shown.get((train_segment.train_segment.name, done.step), [])
            case Measurement(reference=reference):
                return self._shown.get((commit_checkpoint.commit_checkpoint.name, reference.step), [])
            case promote.Offer(candidate=candidate):
                steps = (evaluate.evaluate.name, commit_checkpoint.commit_checkpoint.name)
                found = (self._shown.get((name, candidate.reference.step)) for name in steps)
                return next(filter(None, found), self._newest_segment)
        return []

    def add(self, record: object, value: object, task_run_id: UUID) -> None:
        """Note the task run of the step of this record, which has returned this value, or None."""
        match record, value:
            case train_segment.Segment(), train_segment.Trained(done=done) if done is not None:
                self._shown[train_segment.train_segment.name, done.step] = [task_run_id]
            case commit_checkpoint.Commit(done=done), _:
                self._shown[commit_checkpoint.commit_checkpoint.name, done.step] = [task_run_id]
            case Measurement(reference=reference), _:  # of several suites
                self._shown.setdefault((evaluate.evaluate.name, reference.step), []).append(task_run_id)
        if isinstance(record, train_segment.Segment | tokenize_and_split.Text):
            self._newest_segment = [task_run_id]

    def as_task(self, step: Task[..., Any]) -> Callable[..., Any]:
        """Return the step as a task run of the flow run that this process is, which ends in the state it deserves.

        Prefect shows it and decides nothing: the value or error is the function's, which runs even where the engine
        fails.
        """

        def perform(*arguments: Any) -> Any:
            values, errors = list[Any](), list[BaseException]()

            def function() -> State[Any]:
                try:
                    values.append(step.fn(*arguments))
                except BaseException as error:
                    errors.append(error)
                    raise
                return state_of(values[-1])

            if self.admit(step):
                task = Task(fn=function, name=step.name, task_run_name=partial(name_of, step, arguments))
                # However one has ended, even cancelled, which `allow_failure` would not let pass.
                details = [StateDetails(task_run_id=before) for before in self.before(arguments[0])]
                after: list[State[Any]] = [states.Completed(data=True, state_details=found) for found in details]
                try:
                    ended: State[Any] = task(return_state=True, wait_for=after)
                    if ended.state_details.task_run_id is not None:
                        self.add(arguments[0], next(iter(values), None), ended.state_details.task_run_id)
                except (Exception, Pause):  # a paused flow run commits and ends in order, not at the next task
                    logging.getLogger(__name__).debug("Prefect could not show %s", step.name, exc_info=True)
            if errors:
                raise errors[-1]
            return values[-1] if values else step.fn(*arguments)

        return perform


def name_of(step: Task[..., Any], arguments: Sequence[object]) -> str:
    """Return the name of the task run of this call."""
    template = step.task_run_name if isinstance(step.task_run_name, str) else step.name
    return template.format(**inspect.signature(step.fn).bind(*arguments).arguments)


def state_of(value: object) -> State[Any]:
    """Return how Prefect shows the value of a step: an early end of a segment is a failure named after its reason."""
    match value:
        case train_segment.Trained(failure=failure) if failure is not None:
            return states.Failed(name=failure.reason.state_name, message=failure.detail)
        case train_segment.Trained(done=done) if done is not None and done.stopped:
            name, message = TerminationReason.PREEMPTED.state_name, f"stopped at step {done.step}"
            return states.Failed(name=name, message=f"{message} by a notice")
        case evaluate.Interrupted(why=why):
            return states.Cancelled(message=why)
        case promote.OfferDecision(message=message, is_refused=is_refused):  # a refusal completes the step too
            return states.Completed(name="Refused" if is_refused else "Completed", message=message)
    return states.Completed()


PLAIN = steps_by(lambda step: step.fn)
