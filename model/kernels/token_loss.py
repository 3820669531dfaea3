"""The training and evaluation loss.

Owns its definition. Refuses to know batches, weights between micro-batches and scaling.
"""

import torch.nn.functional as F
from torch import Tensor


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats, in fp32 whatever the logits are: logits (B, T, V), targets (B, T) -> scalar."""
    flat = logits.flatten(0, 1).float()  # (B, T, V) -> (B*T, V)
    return F.cross_entropy(flat, targets.flatten())  # (B, T) -> (B*T,)
