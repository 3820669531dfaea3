"""The five steps of the chain as a parameter: the caller of the chain chooses what executes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State

from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks import commit_checkpoint, evaluate, promote, tokenize_and_split, train_segment
from cairn.tasks.data.snapshot_build import ProgressListener
from cairn.tasks.data.snapshot_lookup import SnapshotReference


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Five callables: the plain functions of `tasks/`, or what shows them."""

    tokenize_and_split: Callable[[tokenize_and_split.Text, ObjectStore, ProgressListener], SnapshotReference]
    train_segment: Callable[[train_segment.Segment, train_segment.Trainer], train_segment.Trained]
    commit_checkpoint: Callable[[commit_checkpoint.Commit, commit_checkpoint.WaitStaged, RunLog], CheckpointReference]
    evaluate: Callable[[evaluate.Measurement, RunLog, Callable[[], bool]], evaluate.Evaluated]
    promote: Callable[[promote.Offer, RunLog], promote.OfferDecision]


PLAIN = Steps(
    tokenize_and_split=tokenize_and_split.tokenize_and_split,
    train_segment=train_segment.train_segment,
    commit_checkpoint=commit_checkpoint.commit_checkpoint,
    evaluate=evaluate.evaluate,
    promote=promote.promote,
)


def result_of(step: Task[..., Any], *arguments: Any) -> Any:
    """Call a Prefect task and return what its state carries, whatever the state; raises what its function raised."""
    state: State[Any] = step(*arguments, return_state=True)  # type: ignore[assignment]
    result = getattr(state.data, "result", state.data)
    if isinstance(result, BaseException):
        raise result
    return result
