"""Finds the cause of a bad loss: windows of a batch that fail on their own, or the step at which the loss spiked."""

import math
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from model.configuration.training import TrainingConfig
from model.data.token_windows import TokenWindows
from model.errors import TokenOutOfRange
from model.training.train_state import TrainState
from model.training.training_step import mean_loss

BASELINE_STEPS = 64


def find_spike(losses: Sequence[float], *, patience: int, rise: float) -> tuple[float, float] | None:
    """Return a spike's lowest loss and baseline: `patience` losses, each `rise` nats above the median before them."""
    if len(losses) < BASELINE_STEPS + patience:
        return None
    level = min(losses[-patience:])
    baseline = median(losses[-patience - BASELINE_STEPS : -patience])
    return (level, baseline) if level > baseline + rise else None


def find_bad_windows(
    state: TrainState, windows: TokenWindows, drawn: NDArray[np.int64], *, training: TrainingConfig
) -> tuple[int, ...]:
    """Return the windows of `drawn` (B,) that fail alone in the run's numerics; if all do, the weights diverged."""
    state.model.eval()  # no dropout: the trial must not draw from the run's generators
    bad = [window for window in dict.fromkeys(drawn.tolist()) if not _is_sound(state, windows, window, training)]
    state.model.zero_grad(set_to_none=True)
    state.model.train()
    return tuple(bad)


def _is_sound(state: TrainState, windows: TokenWindows, window: int, training: TrainingConfig) -> bool:
    try:
        gathered = windows.gather(np.array([window], dtype=np.int64))
    except TokenOutOfRange:
        return False
    tokens = torch.from_numpy(gathered)  # (1, T+1)
    state.model.zero_grad(set_to_none=True)
    loss = mean_loss(state, tokens, training)
    if not math.isfinite(float(loss.detach())):
        return False
    if state.scaler is not None:  # the scaler handles gradients that are too big for fp16
        return True
    loss.backward()
    gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
    return math.isfinite(float(torch.nn.utils.get_total_norm(gradients)))
