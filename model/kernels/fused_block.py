"""One transformer layer in half precision on a CPU, forward and backward written out by hand.

It computes what the stock layer computes under autocast (norms, residual stream and its gradient in fp32, products in
half precision) without autograd's casts, copies and a node for every operation. The tanh GELU of bf16 numbers comes
from a table of all 65,536 values: a lookup takes a third of the time of the tanh.
Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.kernels.blocked_attention import SavedAttention, attend, attend_backward
from model.kernels.dropout_bits import apply_keep_mask, draw_keep_mask

HALF = torch.bfloat16
_CHUNK_NUMBERS = 2**18
"""Numbers looked up at a time, so that their indexes stay in a core's cache."""


def fused_block(
    x: Tensor,
    visible: Tensor | None,
    parts: tuple[nn.LayerNorm | nn.Linear, ...],
    *,
    heads: int,
    epsilon: float,
    dropout: float,
) -> Tensor:
    """Run a layer of `parts`: fp32 (B, T, C) -> (B, T, C).

    `parts` are the first norm, the query-key-value and output projections, the second norm, and the widening and
    narrowing layers. `visible` as in `attend`; `dropout`, 0 outside training, draws from the process's generator.
    """
    parameters = [parameter for part in parts for parameter in (part.weight, part.bias)]
    result: Tensor = _Block.apply(x, visible, heads, epsilon, dropout, *parameters)  # type: ignore[no-untyped-call]
    return result


def uses_fused_block(x: Tensor) -> bool:
    """Whether autocast would compute the layer of `x` in bf16 on a CPU, the case `fused_block` is written for."""
    cpu = x.device.type == "cpu" and x.dtype == torch.float32
    return cpu and torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == HALF


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        visible: Tensor | None,
        n_head: int,
        epsilon: float,
        dropout: float,
        *parameters: Tensor,
    ) -> Tensor:
        norm_1, bias_1, joint, joint_bias, out, out_bias, norm_2, bias_2, wide, wide_bias, narrow, narrow_bias = (
            parameters
        )
        batch, time, width = x.shape
        # Sharded processes gather the norms in half precision too.
        norm_1, norm_2, bias_1, bias_2 = (
            None if number is None else number.float() for number in (norm_1, norm_2, bias_1, bias_2)
        )
        weights = tuple(weight.to(HALF) for weight in (joint, out, wide, narrow))
        with torch.autocast("cpu", enabled=False):
            flat = x.reshape(-1, width)  # (B, T, C) -> (BT, C)
            normed_1, *moments_1 = _norm(flat, norm_1, bias_1, epsilon)
            heads = _linear(normed_1, weights[0], joint_bias).view(batch, time, -1)  # (BT, 3C) -> (B, T, 3C)
            mixed, saved = attend(heads, n_head, visible, dropout)
            mixed = mixed.view(-1, width)  # (B, T, C) -> (BT, C)
            branch, mask_1 = _dropped(_linear(mixed, weights[1], out_bias), dropout)
            middle = flat + branch
            normed_2, *moments_2 = _norm(middle, norm_2, bias_2, epsilon)
            widened = _linear(normed_2, weights[2], wide_bias)  # (BT, 4C)
            active = gelu(widened)
            branch, mask_2 = _dropped(_linear(active, weights[3], narrow_bias), dropout)
            result = middle.view(x.shape) + branch.view(x.shape)  # (BT, C) -> (B, T, C)
        context.dropout, context.blocks, context.biased = dropout, len(saved.weights), joint_bias is not None
        masks = (mask_1, mask_2, *saved.keep_masks) if mask_1 is not None else ()
        context.save_for_backward(
            *(flat, normed_1, *moments_1, saved.heads, mixed, middle, normed_2, *moments_2, widened, active),
            *(*weights, norm_1, bias_1, norm_2, bias_2, *saved.weights, *masks),
        )
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors, dropout, biased = context.saved_tensors, context.dropout, context.biased
        flat, normed_1, mean_1, spread_1, heads, mixed, middle, normed_2, mean_2, spread_2, widened, active = tensors[
            :12
        ]
        joint, out, wide, narrow, norm_1, bias_1, norm_2, bias_2, *rest = tensors[12:]
        probabilities, masks = rest[: context.blocks], rest[context.blocks :]
        saved = SavedAttention(heads=heads, weights=tuple(probabilities), keep_masks=tuple(masks[2:]))
        above = gradient.reshape(flat.shape)  # (B, T, C) -> (BT, C)

        grad_branch = _undropped(above.to(HALF), masks[1:2], dropout)
        grad_active, *grad_narrow = _linear_backward(grad_branch, active, narrow, biased)
        grad_widened = gelu_backward(grad_active, widened)
        grad_normed, *grad_wide = _linear_backward(grad_widened, normed_2, wide, biased)
        grad_middle, *grad_norm_2 = _norm_backward(grad_normed, middle, mean_2, spread_2, norm_2, bias_2)
        grad_middle += above

        grad_branch = _undropped(grad_middle.to(HALF), masks[:1], dropout)
        grad_mixed, *grad_out = _linear_backward(grad_branch, mixed, out, biased)
        grad_heads = attend_backward(grad_mixed.view(gradient.shape), saved, dropout)
        grad_heads = grad_heads.view(len(flat), -1)  # (B, T, 3C) -> (BT, 3C)
        grad_normed, *grad_joint = _linear_backward(grad_heads, normed_1, joint, biased)
        grad_x, *grad_norm_1 = _norm_backward(grad_normed, flat, mean_1, spread_1, norm_1, bias_1)
        grad_x += grad_middle
        parameters = (*grad_norm_1, *grad_joint, *grad_out, *grad_norm_2, *grad_wide, *grad_narrow)
        return grad_x.view(gradient.shape), None, None, None, None, *parameters


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    normed, mean, spread = torch.native_layer_norm(x, (x.shape[1],), weight, bias, epsilon)
    return normed.to(HALF), mean, spread


def _norm_backward(
    gradient: Tensor, x: Tensor, mean: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    needed = [True, True, bias is not None]
    gradients: tuple[Tensor, Tensor, Tensor | None] = torch.ops.aten.native_layer_norm_backward(
        gradient.float(), x, (x.shape[1],), mean, spread, weight, bias, needed
    )
    return gradients


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t())  # (BT, C) x (C, N) -> (BT, N)
    return torch.addmm(bias.to(HALF), x, weight.t())


def _linear_backward(gradient: Tensor, x: Tensor, weight: Tensor, biased: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    grad_weight = torch.mm(gradient.t(), x).float()  # (N, BT) x (BT, C) -> (N, C)
    grad_bias = gradient.sum(dim=0).float() if biased else None
    return torch.mm(gradient, weight), grad_weight, grad_bias  # (BT, N) x (N, C) -> (BT, C)


def _dropped(x: Tensor, dropout: float) -> tuple[Tensor, Tensor | None]:
    if not dropout:
        return x, None
    keep = draw_keep_mask(x.shape, dropout)
    return apply_keep_mask(x, keep, dropout), keep


def _undropped(gradient: Tensor, keep: list[Tensor], dropout: float) -> Tensor:
    return apply_keep_mask(gradient, keep[0], dropout) if keep else gradient


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
