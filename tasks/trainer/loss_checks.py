"""Stops training when the loss explodes, and finds the samples to blame for a step that failed."""

from collections import deque
from typing import NoReturn

from model.data.sample_order import SampleOrder
from model.errors import BadBatch, LossExploded, NonFiniteLoss, TokenOutOfRange
from model.training.divergence import BASELINE_STEPS, find_bad_windows, find_spike
from model.training.train_state import TrainState
from model.training.training_loop import StepResult
from model.training.training_step import StepInputs
from tasks.configuration.settings import DivergenceConfig


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
