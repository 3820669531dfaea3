"""One transformer layer in half precision on a CPU, forward and backward written out.

Owns the order of a layer's operations and their gradients. Refuses to know the network around it and when it pays. The
mathematics is that of the stock layer under autocast: norms, the residual stream and its gradient in fp32, products in
half precision. What autograd would do besides, casts, copies and a node for every operation, is left out.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model.kernels.blocked_attention import Kept, attend, attend_backward
from model.kernels.dropout_bits import draw_survivors, drop
from model.kernels.gelu_table import gelu, gelu_backward

HALF = torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """What a layer is besides its parameters; `dropout` is 0 while it is not training."""

    heads: int
    epsilon: float
    dropout: float


def fused_block(
    x: Tensor, visible: Tensor | None, shape: BlockShape, parts: tuple[nn.LayerNorm | nn.Linear, ...]
) -> Tensor:
    """Do what a layer of `parts` does: fp32 (B, T, C) -> (B, T, C).

    `parts` are the first norm, the joint projection, the output projection, the second norm, the widening and the
    narrowing layer. `visible` as `attend` takes it; dropout is drawn from the process's generator.
    """
    parameters = [parameter for part in parts for parameter in (part.weight, part.bias)]
    result: Tensor = _Block.apply(x, visible, shape, *parameters)  # type: ignore[no-untyped-call]
    return result


def takes_fused_block(x: Tensor) -> bool:
    """Say whether the layer that reads `x` would be computed in bf16 on a CPU, which is what this one is for."""
    cpu = x.device.type == "cpu" and x.dtype == torch.float32
    return cpu and torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == HALF


class _Block(torch.autograd.Function):
    """Keeps each product's inputs, the attention's probabilities, and what the norms were made from."""

    @staticmethod
    def forward(context: Any, x: Tensor, visible: Tensor | None, shape: BlockShape, *parameters: Tensor) -> Tensor:
        norm_1, bias_1, joint, joint_bias, out, out_bias, norm_2, bias_2, wide, wide_bias, narrow, narrow_bias = (
            parameters
        )
        batch, time, width = x.shape
        weights = tuple(weight.to(HALF) for weight in (joint, out, wide, narrow))
        with torch.autocast("cpu", enabled=False):
            flat = x.reshape(-1, width)  # (B, T, C) -> (BT, C)
            normed_1, *moments_1 = _norm(flat, norm_1, bias_1, shape.epsilon)
            heads = _linear(normed_1, weights[0], joint_bias).view(batch, time, -1)  # (BT, 3C) -> (B, T, 3C)
            mixed, kept = attend(heads, shape.heads, visible, shape.dropout)
            mixed = mixed.view(-1, width)  # (B, T, C) -> (BT, C)
            found, drawn_1 = _dropped(_linear(mixed, weights[1], out_bias), shape.dropout)
            middle = flat + found
            normed_2, *moments_2 = _norm(middle, norm_2, bias_2, shape.epsilon)
            widened = _linear(normed_2, weights[2], wide_bias)  # (BT, 4C)
            active = gelu(widened)
            found, drawn_2 = _dropped(_linear(active, weights[3], narrow_bias), shape.dropout)
            result = (middle + found).view(x.shape)  # (BT, C) -> (B, T, C)
        context.shape, context.blocks = shape, len(kept.weights)
        drawn = (drawn_1, drawn_2, *kept.survivors) if drawn_1 is not None else ()
        context.save_for_backward(
            *(flat, normed_1, *moments_1, kept.heads, mixed, middle, normed_2, *moments_2, widened, active),
            *(*weights, norm_1, bias_1, norm_2, bias_2, *kept.weights, *drawn),
        )
        context.biased = joint_bias is not None
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved, shape = context.saved_tensors, context.shape
        flat, normed_1, mean_1, spread_1, heads, mixed, middle, normed_2, mean_2, spread_2, widened, active = saved[:12]
        joint, out, wide, narrow, norm_1, bias_1, norm_2, bias_2, *rest = saved[12:]
        probabilities, drawn = rest[: context.blocks], rest[context.blocks :]
        kept = Kept(heads=heads, weights=tuple(probabilities), survivors=tuple(drawn[2:]))
        biased = context.biased
        above = gradient.reshape(flat.shape)  # (B, T, C) -> (BT, C)

        of_found = _undropped(above.to(HALF), drawn[1:2], shape.dropout)
        of_active, *of_narrow = _linear_backward(of_found, active, narrow, biased)
        of_widened = gelu_backward(of_active, widened)
        of_normed, *of_wide = _linear_backward(of_widened, normed_2, wide, biased)
        of_middle, *of_norm_2 = _norm_backward(of_normed, middle, mean_2, spread_2, norm_2, bias_2)
        of_middle += above

        of_found = _undropped(of_middle.to(HALF), drawn[:1], shape.dropout)
        of_mixed, *of_out = _linear_backward(of_found, mixed, out, biased)
        of_heads = attend_backward(of_mixed.view(gradient.shape), kept, shape.dropout)
        of_heads = of_heads.view(len(flat), -1)  # (B, T, 3C) -> (BT, 3C)
        of_normed, *of_joint = _linear_backward(of_heads, normed_1, joint, biased)
        of_x, *of_norm_1 = _norm_backward(of_normed, flat, mean_1, spread_1, norm_1, bias_1)
        of_x += of_middle
        parameters = (*of_norm_1, *of_joint, *of_out, *of_norm_2, *of_wide, *of_narrow)
        return of_x.view(gradient.shape), None, None, *parameters


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    normed, mean, spread = torch.native_layer_norm(x, (x.shape[1],), weight, bias, epsilon)
    return normed.to(HALF), mean, spread


def _norm_backward(
    gradient: Tensor, x: Tensor, mean: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    wanted = [True, True, bias is not None]
    found: tuple[Tensor, Tensor, Tensor | None] = torch.ops.aten.native_layer_norm_backward(
        gradient.float(), x, (x.shape[1],), mean, spread, weight, bias, wanted
    )
    return found


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t())  # (BT, C) x (C, N) -> (BT, N)
    return torch.addmm(bias.to(HALF), x, weight.t())


def _linear_backward(gradient: Tensor, x: Tensor, weight: Tensor, biased: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    of_weight = torch.mm(gradient.t(), x).float()  # (N, BT) x (BT, C) -> (N, C)
    of_bias = gradient.sum(dim=0).float() if biased else None
    return torch.mm(gradient, weight), of_weight, of_bias  # (BT, N) x (N, C) -> (BT, C)


def _dropped(x: Tensor, dropout: float) -> tuple[Tensor, Tensor | None]:
    if not dropout:
        return x, None
    survivors = draw_survivors(x.shape, dropout)
    return drop(x, survivors, dropout), survivors


def _undropped(gradient: Tensor, survivors: list[Tensor], dropout: float) -> Tensor:
    return drop(gradient, survivors[0], dropout) if survivors else gradient
