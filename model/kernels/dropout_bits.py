"""Dropout on a CPU as bits, set or not: several times cheaper than PyTorch's mask, drawn number by number.

Owns the drawing, from the process's CPU generator, and the dropping. Refuses to know where it is used. The chance is
rounded to 1/32768.
Source: Srivastava et al. 2014, "Dropout" (survivors scaled by the inverse of their share).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_CHANCES = 2**15
_DRAWN_AT_ONCE = 4
"""Numbers of 16 bits in a draw of 64."""


def draw_survivors(shape: Sequence[int], dropout: float) -> Tensor:
    """Draw which numbers of a tensor survive: int16 of that shape, all bits set where one does and none elsewhere."""
    wanted = torch.Size(shape)
    drawn = torch.empty(-(-wanted.numel() // _DRAWN_AT_ONCE), dtype=torch.int64).random_(-(2**63), None)
    bits = drawn.view(torch.int16)[: wanted.numel()].view(wanted)
    # 15 random bits from -2^14 on; what lies below the border becomes negative, and its sign fills all 16 bits.
    return bits.bitwise_right_shift_(1).sub_(_kept(dropout) - _CHANCES // 2).bitwise_right_shift_(15)


def drop(tensor: Tensor, survivors: Tensor, dropout: float) -> Tensor:
    """Return `tensor` (16 bits a number) with 0 for what did not survive, and the rest scaled up."""
    left = (tensor.view(torch.int16) & survivors).view(tensor.dtype)
    return left.mul_(_CHANCES / _kept(dropout))


def _kept(dropout: float) -> int:
    return max(1, round((1.0 - dropout) * _CHANCES))
