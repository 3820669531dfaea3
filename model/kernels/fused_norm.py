"""Norms of the fused layer and their gradients, and how queries and keys are normalised and turned.

Sources: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Su et al. 2021, "RoFormer".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

HALF = torch.bfloat16


def normalize(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, epsilon: float, *, is_rms: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Normalise fp32 rows (N, C); return bf16 and what the backward pass needs: (mean and) inverse spread, (N, 1)."""
    if not is_rms:
        normed, *moments = torch.native_layer_norm(x, (x.shape[1],), gain, bias, epsilon)
        return normed.to(HALF), tuple(moments)
    spread = _inverse_rms(x, epsilon)
    if gain is None:
        return torch.mul(x, spread, out=torch.empty_like(x, dtype=HALF)), (spread,)
    return (x * spread).mul_(gain).to(HALF), (spread,)


def normalize_backward(
    gradient: Tensor, x: Tensor, moments: tuple[Tensor, ...], gain: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of `normalize`'s input, gain and bias, in fp32, from that of its result."""
    if len(moments) == 2:
        needed = [True, gain is not None, bias is not None]
        gradients: tuple[Tensor, Tensor | None, Tensor | None] = torch.ops.aten.native_layer_norm_backward(
            gradient.float(), x, (x.shape[1],), *moments, gain, bias, needed
        )
        return gradients
    exact, normed, grad_gain = gradient.float(), x * moments[0], None
    if gain is not None:
        grad_gain = (exact * normed).sum(dim=0)  # (N, C) -> (C,)
        exact = exact * gain
    return _rms_backward(exact, normed, moments[0]), grad_gain, None


Gains = Sequence[Tensor | None]
"""Those of queries and of keys, each (D,)."""


def place(joint: Tensor, gains: Gains, turned: Tensor | None, epsilon: float | None) -> Tensor | None:
    """Normalise queries and keys unless `epsilon` is None, then turn them where `turned` is given, in place.

    bf16 (B, T, 2, H, D), `turned` (2, T, 1, D/2); returns the inverse spreads (B, T, 2, H, 1) of the normalised.
    """
    if epsilon is None and turned is None:
        return None
    exact, spread = joint.float(), None
    if epsilon is not None:
        spread = _inverse_rms(exact, epsilon)
        exact *= spread
        if (gain := _stacked(gains)) is not None:
            exact *= gain
    joint.copy_(exact if turned is None else _turn(exact, turned, 1.0))
    return spread


def place_backward(
    gradient: Tensor, joint: Tensor | None, spread: Tensor | None, gains: Gains, turned: Tensor | None
) -> Gains:
    """Replace the gradient of placed queries and keys by that of `joint`, the unplaced; return that of the gains."""
    if spread is None and turned is None:
        return None, None
    exact = gradient.float() if turned is None else _turn(gradient.float(), turned, -1.0)
    grad_gains: Gains = (None, None)
    if joint is not None and spread is not None:
        gain, normed = _stacked(gains), joint.float().mul_(spread)
        if gain is not None:
            grad_gains = (exact * normed).sum(dim=(0, 1, 3)).unbind()  # (B, T, 2, H, D) -> (2, D) -> 2 x (D,)
            exact = exact * gain
        exact = _rms_backward(exact, normed, spread)
    gradient.copy_(exact)
    return grad_gains


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (..., C) -> (..., 1)
    return lengths.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


def _rms_backward(gradient: Tensor, normed: Tensor, spread: Tensor) -> Tensor:
    """Return the gradient of a norm's input from that of what it normalised: (..., C)."""
    shares = torch.linalg.vecdot(gradient, normed).unsqueeze(-1)  # (..., C) -> (..., 1)
    return gradient.addcmul(normed, shares, value=-1.0 / normed.shape[-1]).mul_(spread)


def _stacked(gains: Gains) -> Tensor | None:
    """Return the gains of queries and of keys as factors of (B, T, 2, H, D)."""
    queries, keys = gains
    return None if queries is None or keys is None else torch.stack((queries, keys)).float()[:, None]  # (2, 1, D)


def _turn(x: Tensor, turned: Tensor, direction: float) -> Tensor:
    """Rotate each pair of numbers by its position's angle, or back: (B, T, 2, H, D) -> the same."""
    cosine, sine = turned[:, :, None]  # (2, T, 1, D/2) -> 2 x (T, 1, 1, D/2)
    left, right = x.chunk(2, dim=-1)  # 2 x (B, T, 2, H, D/2)
    result = torch.empty_like(x)
    lower, upper = result.chunk(2, dim=-1)
    torch.addcmul(left * cosine, right, sine, value=-direction, out=lower)
    torch.addcmul(right * cosine, left, sine, value=direction, out=upper)
    return result
