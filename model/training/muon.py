"""Muon's update of matrices: momentum made orthogonal by Newton-Schulz iterations, matrices of one shape at once.

The arithmetic and the state are those of `torch.optim.Muon`, with two differences: a tensor in which several matrices
were joined for one product (queries, keys and values) is taken apart, and equal shapes share batched products in bf16.
Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Part:
    """Views of one matrix: its weights and its momentum with the newest gradient mixed in, both (R, C)."""

    weights: Tensor
    direction: Tensor


def update_matrices(optimizer: Muon) -> None:
    """Take one step; a group's `rows` name, for each of its tensors, the rows of the matrices joined in it.

    While the optimizer's `found_inf` is set and not 0, nothing changes, and the host does not wait to know.
    """
    blocked = getattr(optimizer, "found_inf", None)
    for group in optimizer.param_groups:
        shapes: defaultdict[tuple[int, int], list[_Part]] = defaultdict(list)
        for parameter, rows in zip(group["params"], group["rows"], strict=True):
            direction = _mix(parameter.grad, optimizer.state[parameter]["momentum_buffer"], group["momentum"], blocked)
            parts = zip(parameter.split(rows), direction.split(rows), strict=True)
            for weights, each in parts:
                shapes[weights.shape[0], weights.shape[1]].append(_Part(weights=weights, direction=each))
        for shape, same in shapes.items():
            rate = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
            _move(same, rate, group, blocked)


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


def _mix(gradient: Tensor, momentum: Tensor, share: float, blocked: Tensor | None) -> Tensor:
    """Mix the gradient into the momentum and return Nesterov's direction."""
    newest = torch.lerp(momentum, gradient, 1.0 - share)
    momentum.copy_(newest if blocked is None else torch.where(blocked > 0, momentum, newest))
    return torch.lerp(gradient, momentum, share)


def _move(parts: Sequence[_Part], rate: float, group: Mapping[str, Any], blocked: Tensor | None) -> None:
    directions = torch.stack([part.direction for part in parts])  # (N, R, C)
    updates = orthogonalize(directions, group["ns_coefficients"], steps=group["ns_steps"], epsilon=group["eps"])
    kept = 1.0 - group["lr"] * group["weight_decay"]
    for part, update in zip(parts, updates, strict=True):
        moved = part.weights * kept - rate * update  # in fp32
        part.weights.copy_(moved if blocked is None else torch.where(blocked > 0, part.weights, moved))
