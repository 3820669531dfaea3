"""AdamW with GPT-2's decay split, and the learning-rate schedule as a pure function of the step.

Sources: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; 2017, "SGDR" (cosine).
"""

import math

import torch
from torch import nn

from model.configuration.training import TrainingConfig


def make_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """Make AdamW over `model`: matrices and embeddings decay, norms and biases do not.

    Moments and step counters exist from the start (zero), so that a train state has the same names at every step.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=training.betas, fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def learning_rate(step: int, *, steps: int, warmup_steps: int, lr: float, min_lr: float) -> float:
    """Return the rate of 1-based `step`: linear to `lr` at `warmup_steps`, then a cosine to `min_lr` at `steps`."""
    if step <= warmup_steps:
        return lr * step / warmup_steps
    if step >= steps:
        return min_lr
    progress = (step - warmup_steps) / (steps - warmup_steps)
    return min_lr + (lr - min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
