"""Dropout masks as bits for 16-bit tensors on a CPU: several times cheaper than PyTorch's mask.

Drawn from the process's CPU generator; the drop probability is rounded to 1/32768.
Source: Srivastava et al. 2014, "Dropout" (survivors are scaled by the inverse of their share).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_LEVELS = 2**15
_MASKS_PER_DRAW = 4
"""16-bit masks in one random int64."""


def draw_keep_mask(shape: Sequence[int], dropout: float) -> Tensor:
    """Draw an int16 mask of `shape`: all bits set where a number is kept, none where it is dropped."""
    size = torch.Size(shape)
    drawn = torch.empty(-(-size.numel() // _MASKS_PER_DRAW), dtype=torch.int64).random_(-(2**63), None)
    bits = drawn.view(torch.int16)[: size.numel()].view(size)
    # 15 random bits from -2^14 on: values below the threshold become negative, and the sign fills all 16 bits.
    return bits.bitwise_right_shift_(1).sub_(_kept_levels(dropout) - _LEVELS // 2).bitwise_right_shift_(15)


def apply_keep_mask(tensor: Tensor, keep: Tensor, dropout: float) -> Tensor:
    """Return `tensor` (16 bits a number) with dropped numbers set to 0 and the others scaled up."""
    kept = (tensor.view(torch.int16) & keep).view(tensor.dtype)
    return kept.mul_(_LEVELS / _kept_levels(dropout))


def _kept_levels(dropout: float) -> int:
    return max(1, round((1.0 - dropout) * _LEVELS))
