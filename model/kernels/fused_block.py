"""One transformer layer in half precision on a CPU, forward and backward written out by hand.

It computes what the stock layer computes under autocast (norms, rotations, residual stream and its gradient in fp32,
products in half precision) without autograd's casts, copies and a node for every operation. The tanh GELU comes from
a table of the values of all 65,536 numbers: a lookup takes a third of the time of the tanh.
Sources: those of the stock layer; Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.model.configuration.network import FeedForwardKind, ModelConfig
from cairn.model.kernels import attention
from cairn.model.kernels.attention import apply_keep_mask, attend, attend_backward, draw_keep_mask

HALF = torch.bfloat16
_CHUNK_NUMBERS = 2**18
"""Numbers of a table looked up at a time, so that their indexes stay in a core's cache."""
Parts = Sequence[nn.Module | None]
"""A layer's first norm, its query-key-value layer, the norms of queries and keys (or None), the output projection, the
second norm, and the widening and narrowing layers."""
Gains = Sequence[Tensor | None]
"""Those of queries and of keys, each (D,)."""


def fused_block(
    x: Tensor, visible: Tensor | None, turned: Tensor | None, parts: Parts, config: ModelConfig, *, dropout: float
) -> Tensor:
    """Run a layer of `parts`: fp32 (B, T, C) -> (B, T, C).

    `visible` as in `attend`, `turned` as in `Attention`; `dropout`, 0 outside training, draws from the process's
    generator.
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
        masks = rest[context.blocks :]
        saved = attention.SavedAttention(heads, rest[: context.blocks], masks[2:])
        above = gradient.reshape(flat.shape)  # (B, T, C) -> (BT, C)

        grad_branch = apply_keep_mask(above.to(HALF), masks[1], dropout) if masks else above.to(HALF)
        grad_active, *grad_narrow = _linear_backward(grad_branch, active, narrow, biased)
        grad_widened = activate_backward(grad_active, widened, config.feed_forward)
        grad_normed, *grad_wide = _linear_backward(grad_widened, normed_2, wide, biased)
        grad_middle, *grad_norm_2 = normalize_backward(grad_normed, middle, moments_2, gain_2, bias_2)
        grad_middle += above

        grad_branch = apply_keep_mask(grad_middle.to(HALF), masks[0], dropout) if masks else grad_middle.to(HALF)
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
            # Over three dimensions at once the sum takes six times as long.
            summed = (exact * normed).sum(dim=(0, 1))  # (B, T, 2, H, D) -> (2, H, D)
            grad_gains = summed.sum(dim=1).unbind()  # (2, H, D) -> (2, D) -> 2 x (D,)
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


def activate(x: Tensor, kind: FeedForwardKind) -> Tensor:
    """Apply the function to contiguous bf16 rows: (N, I) -> (N, I), of SwiGLU (N, 2I) -> (N, I)."""
    if kind == "gelu":
        result, (values, _) = torch.empty_like(x), _tables()
        for chunk, indexes in _table_indexes(x):
            torch.index_select(values, 0, indexes, out=result.view(-1)[chunk])
        return result
    if kind == "relu2":
        return F.relu(x).square_()
    gate, up = x.chunk(2, dim=1)
    return F.silu(gate).mul_(up)


def activate_backward(gradient: Tensor, x: Tensor, kind: FeedForwardKind) -> Tensor:
    """Return the gradient of `activate`'s input from that of its result."""
    if kind == "relu2":
        return F.relu(x).mul_(gradient).mul_(2.0)
    result = torch.empty_like(x)
    if kind == "gelu":
        slopes = _tables()[1]
        for chunk, indexes in _table_indexes(x):
            grad_x = result.view(-1)[chunk]
            torch.index_select(slopes, 0, indexes, out=grad_x)
            grad_x.mul_(gradient.view(-1)[chunk])
        return result
    gate, up = x.chunk(2, dim=1)
    grad_gate, grad_up = result.chunk(2, dim=1)
    torch.mul(gradient, F.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=grad_gate)
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
