"""How big a GPT-2 and its training are, from shapes alone: parameters, and the memory they take while training.

Owns the formulas. What they leave out: the allocator's slack, the framework's own memory (on CUDA some hundred MB), and
what a compiler fuses away. Refuses to know torch: a plan must be quick, and possible where nothing can be trained.

With P parameters, V ids, C = n_embd, T = block_size, L layers, B windows in a micro-batch, and a = 4 bytes a number in
fp32 (2 for what bf16 or fp16 compute in):

    parameters   P = V C + T C + L (12 C² + 13 C) + 2 C; without biases L (12 C² + 2 C) + C
    weights      4 P, and a P more for the copies that half precision computes with
    gradients    4 P
    optimizer    8 P: AdamW's two moments
    activations  L B T (2 · 4 C + 14 a C): the input of each norm and of each matrix product, the queries, keys and
                 values, and both sides of the GELU, kept for the backward pass; attention is never written out.
                 Recomputed: L B T · 4 C, and one layer's share of the above
    logits       B T V (a + 8), and 4 more where a is 2: the logits, and in fp32 their log-softmax and its gradient
    fused        logits of at most HEAD_CHUNK_BYTES / 4 V positions at once, and 4 (V + B T) C for the gradients made
                 with them; in half precision attention's weights are kept, L B H T² · 2 · 5/8 (four blocks of queries)
"""

from dataclasses import dataclass

from model.configuration import ModelConfig, TrainingConfig

HEAD_CHUNK_BYTES = 128 * 2**20
"""Logits in fp32 that fused kernels hold at once: enough for the matrix product, small beside so large a vocabulary."""

DEVICE_HEAD_CHUNK_BYTES = 2**30
"""The same on an accelerator, in the computing precision: its products are fast only where they are large."""

_FP32_BYTES, _HALF_BYTES = 4, 2
_MOMENTS = 2
_NORMED = 2
"""Numbers a position keeps in fp32 in each layer, in widths: the inputs of the two norms."""
_COMPUTED = 14
"""Numbers a position keeps in the computing precision, in widths: two norms' outputs, q, k, v, mixed, 4 + 4 of GELU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on the device while it trains, by what they are for; an estimate."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        state = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return state + self.activations_bytes + self.logits_bytes


def count_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters, the position table included; exact."""
    width, biases = model.n_embd, model.bias
    layer = 12 * width**2 + (13 if biases else 2) * width
    return (vocab_size + model.block_size) * width + model.n_layer * layer + (2 if biases else 1) * width


def checkpoint_bytes(parameters: int) -> int:
    """Return what a committed checkpoint takes in the store, but for a few KB: weights and both moments, in fp32."""
    return (1 + _MOMENTS) * _FP32_BYTES * parameters


def estimate_memory(
    model: ModelConfig, training: TrainingConfig, vocab_size: int, *, micro_batch: int, recompute: bool
) -> MemoryEstimate:
    """Return what training takes with this micro-batch, in windows; `recompute` is activation checkpointing."""
    parameters = count_parameters(model, vocab_size)
    half = training.precision != "fp32"
    number = _HALF_BYTES if half else _FP32_BYTES
    positions = micro_batch * model.block_size
    layer = positions * model.n_embd * (_NORMED * _FP32_BYTES + _COMPUTED * number)
    kept = positions * model.n_embd * _FP32_BYTES
    fused = training.kernels == "fused"
    if fused and half:
        layer += positions * model.block_size * model.n_head * _HALF_BYTES * 5 // 8
    rows = min(positions, HEAD_CHUNK_BYTES // (_FP32_BYTES * vocab_size)) if fused else positions
    logits = rows * vocab_size * (number + 2 * _FP32_BYTES + (_FP32_BYTES if half else 0))
    return MemoryEstimate(
        parameters_bytes=parameters * (_FP32_BYTES + (number if half else 0)),
        gradients_bytes=parameters * _FP32_BYTES,
        optimizer_bytes=parameters * _MOMENTS * _FP32_BYTES,
        activations_bytes=model.n_layer * kept + layer if recompute else model.n_layer * layer,
        logits_bytes=logits + ((vocab_size + positions) * model.n_embd * _FP32_BYTES if fused else 0),
    )


def largest_micro_batch(
    model: ModelConfig, training: TrainingConfig, vocab_size: int, *, memory_bytes: int, recompute: bool
) -> int | None:
    """Return the most windows, by halving the global batch, that fit `memory_bytes`; None where not one does."""
    windows = training.global_batch
    while windows:
        estimate = estimate_memory(model, training, vocab_size, micro_batch=windows, recompute=recompute)
        if estimate.total_bytes <= memory_bytes:
            return windows
        windows //= 2
    return None
