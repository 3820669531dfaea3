"""The task `train-segment`: the steps between two commits, trained in the attempt's running trainer."""

from collections.abc import Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.errors import TrainerGone
from tasks.policy.failures import Failure
from tasks.policy.termination import TERMINATIONS, TerminationReason
from tasks.trainer.trainer_process import TrainerProcess


@task(
    name="train-segment",
    task_run_name="train-segment {first}-{until}, attempt {attempt}{note}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def train_segment(
    trainer: TrainerProcess, *, attempt: int, first: int, until: int, note: str, explain: Callable[[], Failure]
) -> State[Any]:
    """Train from step `first` to `until`; if it ends earlier, the state's name says why.

    The step it reached is in `trainer.received.segments`.
    """
    try:
        segment = trainer.train_until(until)
    except TrainerGone:
        failure = explain()
        return Failed(name=TERMINATIONS[failure.reason].task_state, message=failure.detail)
    if segment.stopped:
        message = f"stopped at step {segment.step} by a notice"
        return Failed(name=TERMINATIONS[TerminationReason.PREEMPTED].task_state, message=message)
    return Completed(message=f"step {segment.step}")
