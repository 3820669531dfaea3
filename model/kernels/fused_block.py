"""One transformer layer in half precision on a CPU, forward and backward written out by hand.

It computes what the stock layer computes under autocast (norms, rotations, residual stream and its gradient in fp32,
products in half precision) without autograd's casts, copies and a node for every operation.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model.configuration.network import ModelConfig
from model.kernels.blocked_attention import SavedAttention, attend, attend_backward
from model.kernels.dropout_bits import apply_keep_mask, draw_keep_mask
from model.kernels.fused_activation import activate, activate_backward
from model.kernels.fused_norm import HALF, normalize, normalize_backward, place, place_backward


def fused_block(
    x: Tensor,
    visible: Tensor | None,
    turned: Tensor | None,
    parts: Sequence[nn.Module | None],
    config: ModelConfig,
    *,
    dropout: float,
) -> Tensor:
    """Run a layer of `parts`: fp32 (B, T, C) -> (B, T, C).

    `parts` are the first norm, the query-key-value layer, the norms of queries and keys (or None), the output
    projection, the second norm, and the widening and narrowing layers. `visible` as in `attend`, `turned` as in
    `Attention`; `dropout`, 0 outside training, draws from the process's generator.
    """
    parameters = [getattr(part, name, None) for part in parts for name in ("weight", "bias")]
    result: Tensor = _Block.apply(x, visible, turned, config, dropout, *parameters)  # type: ignore[no-untyped-call]
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
        turned: Tensor | None,
        config: ModelConfig,
        dropout: float,
        *parameters: Any,
    ) -> Tensor:
        gain_1, bias_1, joint, joint_bias, q_gain, _, k_gain, _, out, out_bias, *second = parameters
        gain_2, bias_2, wide, wide_bias, narrow, narrow_bias = second
        # Sharded processes gather the norms in half precision too.
        norms = [None if each is None else each.float() for each in (gain_1, bias_1, gain_2, bias_2)]
        weights = [weight.to(HALF) for weight in (joint, out, wide, narrow)]
        gains, is_rms, epsilon = (q_gain, k_gain), config.norm == "rms", config.norm_epsilon
        with torch.autocast("cpu", enabled=False):
            flat = x.reshape(-1, x.shape[2])  # (B, T, C) -> (BT, C)
            normed_1, moments_1 = normalize(flat, norms[0], norms[1], epsilon, is_rms=is_rms)
            heads = _spread_heads(_linear(normed_1, weights[0], joint_bias).view(*x.shape[:2], -1), config)
            unplaced = heads[:, :, :2].clone() if config.qk_norm else None  # (B, T, 2, H, D)
            spread = place(heads[:, :, :2], gains, turned, epsilon if config.qk_norm else None)
            mixed, saved = attend(heads.flatten(2), config.n_head, visible, dropout)  # -> (B, T, H D)
            mixed = mixed.flatten(0, 1)  # (B, T, H D) -> (BT, H D)
            branch, mask_1 = _dropped(_linear(mixed, weights[1], out_bias), dropout)
            middle = flat + branch
            normed_2, moments_2 = normalize(middle, norms[2], norms[3], epsilon, is_rms=is_rms)
            widened = _linear(normed_2, weights[2], wide_bias)  # (BT, I), of SwiGLU (BT, 2I)
            active = activate(widened, config.feed_forward)
            branch, mask_2 = _dropped(_linear(active, weights[3], narrow_bias), dropout)
            result = middle.view(x.shape) + branch.view(x.shape)  # (BT, C) -> (B, T, C)
        context.config, context.dropout = config, dropout
        context.biased, context.moments, context.blocks = joint_bias is not None, len(moments_1), len(saved.weights)
        masks = (mask_1, mask_2, *saved.keep_masks) if mask_1 is not None else ()
        context.save_for_backward(
            *(flat, normed_1, saved.heads, mixed, middle, normed_2, widened, active, unplaced, spread, turned),
            *(*weights, *norms, *gains, *moments_1, *moments_2, *saved.weights, *masks),
        )
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors, config, dropout, biased = context.saved_tensors, context.config, context.dropout, context.biased
        flat, normed_1, heads, mixed, middle, normed_2, widened, active, unplaced, spread, turned = tensors[:11]
        joint, out, wide, narrow, gain_1, bias_1, gain_2, bias_2, *gains = tensors[11:21]
        rest, count = tensors[21:], context.moments
        moments_1, moments_2, rest = rest[:count], rest[count : 2 * count], rest[2 * count :]
        probabilities, masks = rest[: context.blocks], rest[context.blocks :]
        saved = SavedAttention(heads=heads, weights=tuple(probabilities), keep_masks=tuple(masks[2:]))
        above = gradient.reshape(flat.shape)  # (B, T, C) -> (BT, C)

        grad_branch = _undropped(above.to(HALF), masks[1:2], dropout)
        grad_active, *grad_narrow = _linear_backward(grad_branch, active, narrow, biased)
        grad_widened = activate_backward(grad_active, widened, config.feed_forward)
        grad_normed, *grad_wide = _linear_backward(grad_widened, normed_2, wide, biased)
        grad_middle, *grad_norm_2 = normalize_backward(grad_normed, middle, moments_2, gain_2, bias_2)
        grad_middle += above

        grad_branch = _undropped(grad_middle.to(HALF), masks[:1], dropout)
        grad_mixed, *grad_out = _linear_backward(grad_branch, mixed, out, biased)
        grad_heads = attend_backward(grad_mixed.view(*gradient.shape[:2], -1), saved, dropout)
        grad_heads = grad_heads.unflatten(2, (3, config.n_head, -1))  # (B, T, 3 H D) -> (B, T, 3, H, D)
        grad_gains = place_backward(grad_heads[:, :, :2], unplaced, spread, gains, turned)
        grad_joint_out = _gather_heads(grad_heads, config).flatten(0, 1)  # (B, T, (H + 2K) D) -> (BT, (H + 2K) D)
        grad_normed, *grad_joint = _linear_backward(grad_joint_out, normed_1, joint, biased)
        grad_x, *grad_norm_1 = normalize_backward(grad_normed, flat, moments_1, gain_1, bias_1)
        grad_x += grad_middle
        of_gains = (grad_gains[0], None, grad_gains[1], None)
        of_parameters = (*grad_norm_1, *grad_joint, *of_gains, *grad_out, *grad_norm_2, *grad_wide, *grad_narrow)
        return grad_x.view(gradient.shape), None, None, None, None, *of_parameters


def _spread_heads(joint: Tensor, config: ModelConfig) -> Tensor:
    """Give every head keys and values: (B, T, (H + 2K) D) -> (B, T, 3, H, D)."""
    groups = config.n_head // config.n_kv_head
    if groups > 1:
        parts = joint.split((config.attention_width, config.key_width, config.key_width), dim=2)
        query, *others = (part.unflatten(2, (-1, config.head_size)) for part in parts)  # (B, T, H or K, D)
        joint = torch.cat([query, *(other.repeat_interleave(groups, dim=2) for other in others)], dim=2)
    return joint.view(*joint.shape[:2], 3, config.n_head, config.head_size)


def _gather_heads(gradient: Tensor, config: ModelConfig) -> Tensor:
    """Return the gradient of `_spread_heads`: (B, T, 3, H, D) -> (B, T, (H + 2K) D)."""
    groups = config.n_head // config.n_kv_head
    if groups > 1:
        query, *others = gradient.unbind(dim=2)
        summed = (other.unflatten(2, (-1, groups)).sum(dim=3) for other in others)  # (B, T, H, D) -> (B, T, K, D)
        return torch.cat([query, *summed], dim=2).flatten(2)
    return gradient.flatten(2)


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
