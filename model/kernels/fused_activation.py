"""The functions inside the fused layer's feed-forward part, and their gradients, in bf16.

The tanh GELU comes from a table of the values of all 65,536 numbers: a lookup takes a third of the time of the tanh.
Sources: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units"; So et al. 2021, "Primer" (squared ReLU); Shazeer
2020, "GLU Variants Improve Transformer".
"""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from model.configuration.network import FeedForwardKind

_CHUNK_NUMBERS = 2**18
"""Numbers looked up at a time, so that their indexes stay in a core's cache."""


def activate(x: Tensor, kind: FeedForwardKind) -> Tensor:
    """Apply the function to contiguous bf16 rows: (N, I) -> (N, I), of SwiGLU (N, 2I) -> (N, I)."""
    if kind == "gelu":
        return gelu(x)
    if kind == "relu2":
        return F.relu(x).square_()
    gate, up = x.chunk(2, dim=1)
    return F.silu(gate).mul_(up)


def activate_backward(gradient: Tensor, x: Tensor, kind: FeedForwardKind) -> Tensor:
    """Return the gradient of `activate`'s input from that of its result."""
    if kind == "gelu":
        return gelu_backward(gradient, x)
    if kind == "relu2":
        return F.relu(x).mul_(gradient).mul_(2.0)
    gate, up = x.chunk(2, dim=1)
    result = torch.empty_like(x)
    grad_gate, grad_up = result.chunk(2, dim=1)
    torch.mul(gradient, F.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=grad_gate)
    return result


def gelu(x: Tensor) -> Tensor:
    """Return the GELU of contiguous bf16 `x`, in the same shape."""
    result, (values, _) = torch.empty_like(x), _tables()
    for chunk, indexes in _table_indexes(x):
        torch.index_select(values, 0, indexes, out=result.view(-1)[chunk])
    return result


def gelu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `x` from the gradient of its GELU; both bf16, contiguous, in the same shape."""
    result, (_, slopes) = torch.empty_like(x), _tables()
    for chunk, indexes in _table_indexes(x):
        grad_x = result.view(-1)[chunk]
        torch.index_select(slopes, 0, indexes, out=grad_x)
        grad_x.mul_(gradient.view(-1)[chunk])
    return result


@functools.cache
def _tables() -> tuple[Tensor, Tensor]:
    all_values = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    exact = all_values.float()
    # Without autograd: activation checkpointing counts the tensors that a layer saves, and these would be among them.
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        values = F.gelu(exact, approximate="tanh")
        slopes = torch.ops.aten.gelu_backward(torch.ones_like(exact), exact, approximate="tanh")
    return values.bfloat16(), slopes.bfloat16()


def _table_indexes(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    codes = x.view(torch.uint16).view(-1)
    for begin in range(0, len(codes), _CHUNK_NUMBERS):
        chunk = slice(begin, min(begin + _CHUNK_NUMBERS, len(codes)))
        yield chunk, codes[chunk].to(torch.int32)
