"""AdamW with GPT-2's decay split, its state present from the first moment.

Owns which parameters decay. Refuses to know the schedule and the loop.
Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
"""

import torch
from torch import nn

from model.configuration.training import TrainingConfig


def make_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """Make AdamW over `model`: matrices and embeddings decay, norms and biases do not.

    Moments and step counters exist at once (zero), so that a train state has the same names at every step.
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


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` for every parameter from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
