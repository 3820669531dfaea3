"""The task `train-segment`: the steps between two commits, or between several where those are seconds apart."""

from collections.abc import Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from cairn.storage.errors import StorageError
from cairn.tasks.errors import TrainerGone
from cairn.tasks.policy.failures import Failure
from cairn.tasks.policy.termination import TERMINATIONS, TerminationReason
from cairn.tasks.trainer.trainer_protocol import SegmentDone


@task(
    name="train-segment",
    task_run_name="train-segment {first}-{until}, attempt {attempt}{note}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def train_segment(
    train: Callable[[], SegmentDone],
    *,
    attempt: int,
    first: int,
    until: int,
    note: str,
    explain: Callable[[BaseException], Failure],
) -> State[Any]:
    """Train from step `first` to `until` by `train`, which returns the last segment; an early end is named by why."""
    try:
        segment = train()
    except (TrainerGone, StorageError) as problem:
        failure = explain(problem)
        return Failed(name=TERMINATIONS[failure.reason].task_state, message=failure.detail)
    if segment.stopped:
        message = f"stopped at step {segment.step} by a notice"
        return Failed(name=TERMINATIONS[TerminationReason.PREEMPTED].task_state, message=message)
    return Completed(message=f"step {segment.step}")
