"""What follows each step of an attempt: its record, the check for an exploded loss, and blame for a failed step."""

import math
import time
from collections import deque
from dataclasses import asdict
from typing import NoReturn

from model.data.sample_order import SampleOrder
from model.errors import BadBatch, LossExploded, NonFiniteLoss, TokenOutOfRange
from model.training.divergence import BASELINE_STEPS, find_bad_windows, find_spike
from model.training.parallel import Ranks
from model.training.train_state import TrainState
from model.training.training_loop import StepResult
from model.training.training_step import StepInputs
from storage.logs.log_entry import utc_now
from storage.logs.step_log import StepLog, StepRecord
from storage.stores.object_store import ObjectStore
from tasks.configuration.settings import DivergenceConfig
from tasks.trainer.trainer_channel import Channel
from tasks.trainer.trainer_protocol import SegmentDone, StepDone, TrainerSpec


class StepReporter:
    """Counts the steps of one attempt; only rank 0 stores and sends their records."""

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
            norm = result.grad_norm if math.isfinite(result.grad_norm) else None
            record = StepRecord(
                **{**asdict(result), "grad_norm": norm},
                attempt=self._attempt,
                at=utc_now(),
                world_size=self._ranks.size,
            )
            self._log.write(record)
            self._channel.send(StepDone(record=record, tokens=self._tokens, gpu_seconds=self._gpu_seconds()))

    def report_segment(self, *, step: int, stopped: bool, behind: int | None = None) -> None:
        """Send that a segment has ended; without a checkpoint where that of step `behind` is still on its way."""
        tokens, gpu_seconds = self._tokens, self._gpu_seconds()
        self._channel.send(
            SegmentDone(step=step, stopped=stopped, tokens=tokens, gpu_seconds=gpu_seconds, behind=behind)
        )

    def publish(self) -> None:
        """Upload the records, if the store is not a local folder."""
        if self._ranks.is_first:
            self._log.publish()

    def _gpu_seconds(self) -> float:
        return (time.monotonic() - self._started) * self._ranks.size


class SpikeCheck:
    """The recent losses of an attempt, and the rule for when they have exploded."""

    def __init__(self, rule: DivergenceConfig, order: SampleOrder) -> None:
        """Start without losses; `order` names the windows of a step."""
        self._rule, self._order = rule, order
        self._losses: deque[float] = deque(maxlen=BASELINE_STEPS + rule.patience_steps)

    def check(self, result: StepResult) -> None:
        """Add a step's loss; raises LossExploded with the spike's steps and windows."""
        self._losses.append(result.train_loss)
        spike = find_spike(list(self._losses), patience=self._rule.patience_steps, rise=self._rule.rise_nats)
        if spike is None:
            return
        (level, baseline), last = spike, result.step
        first = last - self._rule.patience_steps + 1
        windows = [window for step in range(first, last + 1) for window in self._order.windows_of(step - 1)]
        raise LossExploded(step=last, spike_step=first, level=level, baseline=baseline, windows=windows)


def raise_for_samples(error: NonFiniteLoss | TokenOutOfRange, state: TrainState, inputs: StepInputs) -> NoReturn:
    """Raise BadBatch with the samples to blame, or NonFiniteLoss if all samples fail: then the weights are to blame."""
    step, drawn = state.step + 1, inputs.order.windows_of(state.step)
    bad = find_bad_windows(state, inputs.windows, drawn, training=inputs.training)
    if isinstance(error, TokenOutOfRange):
        raise BadBatch(step=step, windows=bad, why="token ids outside the vocabulary") from error
    if 0 < len(bad) < len(set(drawn.tolist())):
        raise BadBatch(step=step, windows=bad, why=f"{error.quantity} is {error.value}") from error
    raise NonFiniteLoss(step=step, quantity=error.quantity, value=error.value, windows=drawn.tolist()) from error
