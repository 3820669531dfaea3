"""The task `train-segment`: steps an attempt trains between two commits, in the trainer that is already there."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.trainer_process import TrainerProcess
from tasks.trainer_protocol import SegmentDone


@task(
    name="train-segment",
    task_run_name="train-segment {first}→{until} · attempt {attempt}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def train_segment(trainer: TrainerProcess, *, attempt: int, first: int, until: int) -> SegmentDone:
    """Train from `first` until `until`, or less far when a notice came; raises `TrainerGone` when the child died."""
    return trainer.train_until(until)
