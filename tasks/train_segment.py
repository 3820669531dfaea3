"""The step `train-segment`: the steps between two commits."""

from dataclasses import dataclass
from typing import Protocol

from prefect import task

from cairn.storage.errors import StorageError
from cairn.tasks.errors import TrainerGone
from cairn.tasks.policy import failures
from cairn.tasks.trainer.trainer_protocol import SegmentDone


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The steps from `first` to `until` of an attempt; `changed` says what its bits differ by from here.

    `stall_seconds` is how long training waits at `until` for the upload before, None for as long as that takes.
    """

    attempt: int
    first: int
    until: int
    changed: str = ""
    stall_seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.first}-{self.until}, attempt {self.attempt}{f' ({self.changed})' if self.changed else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The result of a segment: `done`, or the error that ended it and the failure that the evidence makes of it."""

    segment: Segment
    done: SegmentDone | None
    problem: TrainerGone | StorageError | None = None
    failure: failures.Failure | None = None

    @property
    def is_staged(self) -> bool:
        """Whether its checkpoint is staged: no upload was in its way, and there are steps, or none but this one."""
        is_new = self.done is not None and (self.done.step > self.segment.first or self.segment.until == self.done.step)
        return is_new and self.done is not None and self.done.behind is None


class Trainer(Protocol):
    """The trainer of one attempt."""

    def train(self, segment: Segment) -> SegmentDone:
        """Train a segment; raises `TrainerGone` or a storage error."""

    def explain(self, problem: TrainerGone | StorageError) -> failures.Failure:
        """End the trainer, and return what all evidence makes of its end."""


@task(name="train-segment", task_run_name="train-segment {segment}", persist_result=False)
def train_segment(segment: Segment, trainer: Trainer) -> Trained:
    """Train the segment; a failure is a value."""
    try:
        return Trained(segment=segment, done=trainer.train(segment))
    except (TrainerGone, StorageError) as problem:
        return Trained(segment=segment, done=None, problem=problem, failure=trainer.explain(problem))
