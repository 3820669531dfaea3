"""The optimizers of a network's parameters, and the learning-rate schedule as a pure function of the step.

Sources: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; 2017, "SGDR" (cosine); Kingma and Ba 2015,
"Adam"; Jordan et al. 2024, "Muon"; Hu et al. 2024, "MiniCPM" (warm-up, stable, decay).
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from model.architectures.gpt import GPT
from model.configuration.parameter_table import parameter_table
from model.configuration.training import TrainingConfig
from model.training.muon import update_matrices


def make_optimizers(model: GPT, training: TrainingConfig) -> tuple[Optimizer, ...]:
    """Make the configured optimizer; Muon has the layers' matrices, AdamW beside it the rest.

    Matrices and tables decay, gains and biases do not. All moments are there, as zeros, from the start.
    """
    _spare_compiler()
    parameters = dict(model.named_parameters())
    table = [row for row in parameter_table(model.config, model.vocab_size) if parameters[row.name].requires_grad]
    for_muon = [training.optimizer == "muon" and row.kind == "matrix" for row in table]
    matrices = [row for row, is_muons in zip(table, for_muon, strict=True) if is_muons]
    others = [row for row, is_muons in zip(table, for_muon, strict=True) if not is_muons]
    groups: list[dict[str, Any]] = [
        {"params": [parameters[row.name] for row in others if row.decays], "weight_decay": training.weight_decay},
        {"params": [parameters[row.name] for row in others if not row.decays], "weight_decay": 0.0},
    ]
    optimizers = [_make_optimizer([group for group in groups if group["params"]], training)]
    if matrices:
        group = {"params": [parameters[row.name] for row in matrices], "rows": [row.rows for row in matrices]}
        optimizers.append(
            Muon([group], lr=training.muon_lr, weight_decay=training.weight_decay, momentum=training.momentum)
        )
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            optimizer.state[parameter] = dict(_zero_moments(optimizer, parameter))
    return tuple(optimizers)


def _make_optimizer(groups: list[dict[str, Any]], training: TrainingConfig) -> Optimizer:
    if training.optimizer in ("momentum", "sgd"):
        momentum = training.momentum if training.optimizer == "momentum" else 0.0
        return SGD(groups, lr=training.lr, momentum=momentum, fused=True)
    kind = Adam if training.optimizer == "adam" else AdamW
    return kind(groups, lr=training.lr, betas=training.betas, fused=True)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _zero_moments(optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    if isinstance(optimizer, Adam):
        yield "step", torch.zeros((), dtype=torch.float32, device=parameter.device)
        yield "exp_avg", torch.zeros_like(parameter, memory_format=torch.preserve_format)
        yield "exp_avg_sq", torch.zeros_like(parameter, memory_format=torch.preserve_format)
    elif isinstance(optimizer, Muon) or optimizer.defaults["momentum"]:
        yield "momentum_buffer", torch.zeros_like(parameter, memory_format=torch.preserve_format)


def moments_of(optimizers: Sequence[Optimizer], parameter: Tensor) -> Mapping[str, Tensor]:
    """Return what the optimizer of this parameter keeps for it, by name."""
    return next((optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state), {})


def set_rate(optimizers: Sequence[Optimizer], step: int, training: TrainingConfig) -> float:
    """Set the rates of 1-based `step`, Muon's in its own proportion, and return that of the schedule."""
    rate = learning_rate(step, training)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * training.muon_lr / training.lr if isinstance(optimizer, Muon) else rate
    return rate


def update_weights(optimizers: Sequence[Optimizer]) -> None:
    """Take the optimizers' own steps, without the wrappers that import torch's compiler for a second or more."""
    with torch.no_grad():
        for optimizer in optimizers:
            if isinstance(optimizer, Muon):
                update_matrices(optimizer)
            else:
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
