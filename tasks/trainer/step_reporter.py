"""Counts an attempt's steps, stores their records and reports them to the parent."""

import time
from dataclasses import asdict

from model.training.parallel import Ranks
from model.training.training_loop import StepResult
from storage.logs.step_log import StepLog, StepRecord
from storage.stores.object_store import ObjectStore
from tasks.trainer.parent_channel import Channel
from tasks.trainer.trainer_protocol import SegmentDone, StepDone, TrainerSpec


class StepReporter:
    """The totals of one attempt; only rank 0 stores and sends records."""

    def __init__(self, spec: TrainerSpec, store: ObjectStore, run_prefix: str, channel: Channel, ranks: Ranks) -> None:
        """Open the step log; GPU-seconds count from now."""
        self._attempt, self._channel, self._ranks = spec.attempt, channel, ranks
        self._step_tokens = spec.training.global_batch * spec.model.block_size
        self._log = StepLog(store, run_prefix, spec.attempt, spool_dir=spec.work_dir)
        self._started = time.monotonic()
        self._tokens = 0
        self.learning_rate = 0.0

    def report(self, result: StepResult) -> None:
        """Count a step; store and send its record."""
        self.learning_rate = result.lr
        self._tokens += self._step_tokens
        if self._ranks.is_first:
            record = step_record(result, self._attempt)
            self._log.write(record)
            self._channel.send(StepDone(record=record, tokens=self._tokens, gpu_seconds=self._gpu_seconds()))

    def report_segment(self, *, step: int, stopped: bool) -> None:
        """Send that a segment has ended."""
        done = SegmentDone(step=step, stopped=stopped, tokens=self._tokens, gpu_seconds=self._gpu_seconds())
        self._channel.send(done)

    def publish(self) -> None:
        """Upload the records, if the store is not a local folder."""
        if self._ranks.is_first:
            self._log.publish()

    def _gpu_seconds(self) -> float:
        return (time.monotonic() - self._started) * self._ranks.size


def step_record(result: StepResult, attempt: int) -> StepRecord:
    """Return a step's result as the record that is stored and sent."""
    return StepRecord(attempt=attempt, **asdict(result))
