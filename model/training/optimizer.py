"""The optimizers of a network's parameters, and the learning-rate schedule as a pure function of the step.

Sources: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; 2017, "SGDR" (cosine); Kingma and Ba 2015,
"Adam"; Jordan et al. 2024, "Muon"; Hu et al. 2024, "MiniCPM" (warm-up, stable, decay).
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from cairn.model.architectures.adapters import WITHIN
from cairn.model.architectures.own_network import Network, OwnNetwork
from cairn.model.configuration.network import parameter_table
from cairn.model.configuration.training import TrainingConfig


def make_optimizers(model: Network, training: TrainingConfig) -> tuple[Optimizer, ...]:
    """Make the configured optimizer; Muon has the layers' matrices, AdamW beside it the rest.

    Matrices and tables decay, gains and biases do not; a module of one's own may say otherwise. All moments are there,
    as zeros, from the start.
    """
    # Before its first call each of these imports the compiler only to be left out of it: let them run as they are.
    for method in (Optimizer.add_param_group, Optimizer.zero_grad):
        plain = inspect.unwrap(method)
        plain.__dict__.setdefault("__dynamo_disable", plain)
    parameters = dict(model.named_parameters())
    adapters = [parameter for name, parameter in parameters.items() if WITHIN in name]
    rows = () if isinstance(model, OwnNetwork) else parameter_table(model.config, model.vocab_size)
    table = [row for row in rows if parameters[row.name].requires_grad]
    matrices = [row for row in table if training.optimizer == "muon" and row.kind == "matrix"]
    others = [row for row in table if training.optimizer != "muon" or row.kind != "matrix"]
    decaying = [parameters[row.name] for row in others if row.decays] + adapters
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": training.weight_decay},
        {"params": [parameters[row.name] for row in others if not row.decays], "weight_decay": 0.0},
    ]
    if isinstance(model, OwnNetwork):
        groups = model.optimizer_groups(training.weight_decay)
    groups = [group for group in groups if group["params"]]
    if training.optimizer in ("momentum", "sgd"):
        momentum = training.momentum if training.optimizer == "momentum" else 0.0
        optimizers: list[Optimizer] = [SGD(groups, lr=training.lr, momentum=momentum, fused=True)]
    else:
        kind = Adam if training.optimizer == "adam" else AdamW
        optimizers = [kind(groups, lr=training.lr, betas=training.betas, fused=True)]
    if matrices:
        group = {"params": [parameters[row.name] for row in matrices], "rows": [row.rows for row in matrices]}
        decay, momentum = training.weight_decay, training.momentum
        optimizers.append(Muon([group], lr=training.muon_lr, weight_decay=decay, momentum=momentum))
    for optimizer in optimizers:
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            names: tuple[str, ...] = ("exp_avg", "exp_avg_sq") if isinstance(optimizer, Adam) else ("momentum_buffer",)
            if isinstance(optimizer, SGD) and not optimizer.defaults["momentum"]:
                names = ()
            zeros = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in names}
            if isinstance(optimizer, Adam):
                zeros["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = zeros
    return tuple(optimizers)


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


def update_matrices(optimizer: Muon) -> None:
    """Take one step; a group's `rows` name, for each of its tensors, the rows of the matrices joined in it.

    The arithmetic and the state are those of `torch.optim.Muon`, with two differences: a tensor in which several
    matrices were joined for one product (queries, keys and values) is taken apart, and equal shapes share batched
    products in bf16. While the optimizer's `found_inf` is set and not 0, nothing changes, and the host does not wait.
    """
    blocked = getattr(optimizer, "found_inf", None)
    for group in optimizer.param_groups:
        shapes: defaultdict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for parameter, rows in zip(group["params"], group["rows"], strict=True):
            gradient, momentum = parameter.grad, optimizer.state[parameter]["momentum_buffer"]
            newest = torch.lerp(momentum, gradient, 1.0 - group["momentum"])
            momentum.copy_(newest if blocked is None else torch.where(blocked > 0, momentum, newest))
            direction = torch.lerp(gradient, momentum, group["momentum"])  # Nesterov's
            for part in zip(parameter.split(rows), direction.split(rows), strict=True):  # 2 x (R, C)
                shapes[part[0].shape].append(part)
        for shape, same in shapes.items():
            rate = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
            kept = 1.0 - group["lr"] * group["weight_decay"]
            directions = torch.stack([direction for _, direction in same])  # (N, R, C)
            updates = orthogonalize(directions, group["ns_coefficients"], steps=group["ns_steps"], epsilon=group["eps"])
            for (weights, _), update in zip(same, updates, strict=True):
                moved = weights * kept - rate * update  # in fp32
                weights.copy_(moved if blocked is None else torch.where(blocked > 0, weights, moved))


def orthogonalize(matrices: Tensor, coefficients: Sequence[float], *, steps: int, epsilon: float) -> Tensor:
    """Return bf16 matrices with the same singular vectors and singular values near 1: (N, R, C) -> (N, R, C)."""
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.bfloat16()
    found = found.mT if tall else found  # (N, r, c) with r <= c
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=epsilon)
    for _ in range(steps):
        gram = torch.bmm(found, found.mT)  # (N, r, c) x (N, c, r) -> (N, r, r)
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if tall else found


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
