"""AdamW with GPT-2's decay split, and the learning-rate schedule as a pure function of the step.

Sources: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; 2017, "SGDR" (cosine);
Hu et al. 2024, "MiniCPM" (warm-up, stable, decay).
"""

import inspect
import math

import torch
from torch import nn
from torch.optim import Optimizer

from model.configuration.training import TrainingConfig


def make_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """Make AdamW over `model`: matrices and embeddings decay; moments (zero) have their names from the start."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    _spare_compiler()
    optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=training.betas, fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def update_weights(optimizer: Optimizer) -> None:
    """Take the optimizer's own step, without the wrappers that import torch's compiler for a second or more."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def _spare_compiler() -> None:
    """Let these methods run as they are: before its first call each imports the compiler only to be left out of it."""
    for method in (Optimizer.add_param_group, Optimizer.zero_grad):
        plain = inspect.unwrap(method)
        plain.__dict__.setdefault("__dynamo_disable", plain)


def learning_rate(step: int, training: TrainingConfig) -> float:
    """Return the rate of 1-based `step`: linear to `lr` in the warm-up, then by the schedule to `min_lr` at `steps`."""
    first = training.warmup_steps if training.schedule == "cosine" else training.steps - training.decay_steps
    if step <= training.warmup_steps:
        return training.lr * step / training.warmup_steps
    if step >= training.steps:
        return training.min_lr
    progress = max(0.0, (step - first) / (training.steps - first))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if training.schedule == "cosine" else 1.0 - progress
    return training.min_lr + (training.lr - training.min_lr) * left
