"""Which samples of a failed batch are guilty: each is tried alone, with the weights as they are.

Owns the trial, in the arithmetic that failed: in another one the loss may be finite. Refuses to know what is done
about the guilty. A batch whose every sample fails convicts no sample: then it is the weights that have diverged.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from model.configuration.training import TrainingConfig
from model.data.token_windows import TokenWindows
from model.errors import TokenOutOfRange
from model.training.train_state import TrainState
from model.training.training_step import mean_loss


def guilty_windows(
    state: TrainState, windows: TokenWindows, drawn: NDArray[np.int64], *, training: TrainingConfig
) -> tuple[int, ...]:
    """Return the windows of `drawn` (B,) whose own tokens, loss or gradient cannot be used; no weight changes."""
    state.model.eval()  # no dropout: the trial must not draw from the run's generators
    guilty = [window for window in dict.fromkeys(drawn.tolist()) if not _is_sound(state, windows, window, training)]
    state.optimizer.zero_grad(set_to_none=True)
    state.model.train()
    return tuple(guilty)


def _is_sound(state: TrainState, windows: TokenWindows, window: int, training: TrainingConfig) -> bool:
    try:
        gathered = windows.gather(np.array([window], dtype=np.int64))
    except TokenOutOfRange:
        return False
    tokens = torch.from_numpy(gathered).to(state.device)  # (1, T+1)
    state.optimizer.zero_grad(set_to_none=True)
    loss = mean_loss(state, tokens, training)
    if not math.isfinite(float(loss.detach())):
        return False
    if state.scaler is not None:  # a gradient too big for fp16 is the scaler's business
        return True
    loss.backward()
    gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
    return math.isfinite(float(torch.nn.utils.get_total_norm(gradients)))
