"""The evaluation mode of a network, entered and left without a trace.

Owns the switch. Refuses to know what is evaluated.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turn dropout and gradients off for the block, then restore the mode the model was in."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
