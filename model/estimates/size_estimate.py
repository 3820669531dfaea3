"""Estimates a GPT-2's parameters and one trainer's peak memory from shapes alone. Imports no torch.

Left out: what a compiler fuses away, and prefetched batches.

With P parameters, V ids, C = n_embd, T = block_size, L layers, H heads, N = B T positions in a micro-batch of B
windows, and a = 4 bytes a number in fp32 (2 for what bf16 or fp16 compute in):

    parameters   P = V C + T C + L (12 C² + 13 C) + 2 C; without biases L (12 C² + 2 C) + C
    weights      4 P, and during a half-precision micro-batch 2 for each number of a matrix
    optimizer    8 P: AdamW's two moments
    gradients    none before the first backward pass, then 4 P, also during the next micro-batch of a step. Embedding
                 and head share one table: each makes a gradient of 4 V C before the two are added
    activations  N L (2 · 4 C + 14 a C): the input of each norm and of each matrix product, queries, keys and values,
                 and both sides of the GELU. Recomputed: N L · 4 C, and one layer's share.
                 The backward pass of a layer takes N C (8 + 8 a) for the gradients between its parts
    attention    fused half precision on a CPU saves 2 bytes a probability (`saved_probabilities` of each head and
                 window); stock kernels with dropout on a CPU save three numbers for each pair of positions
    dropout      a saved number (fused 2 bytes) for each result
    logits       stock: 12 N V: log-softmax in fp32, the gradient of the losses, and that of the logits
    fused        `HEAD_CHUNK_BYTES` / 4 V positions at a time, 4 bytes a logit; 4 V C of gradient, a V C of each
                 chunk's share, 4 N C; the table in half. On CUDA `DEVICE_HEAD_CHUNK_BYTES` and more tables
    several      processes: `ddp` keeps 4 P of buckets; `fsdp` divides parameters, gradients and moments
    host copy    12 P on the host for the checkpoint being staged, divided among processes
    runtime      a trainer's process with the smallest of networks: `RUNTIME_BYTES`

The peak is the largest of three moments: the head of a micro-batch, the start of its backward pass and its end. On a
CPU the C library keeps freed blocks under `LARGEST_POOLED_BYTES` and returns larger ones, so the estimate adds the peak
of the small blocks to the peak of the large ones. Gaps in the pool add about an eighth (`POOL_HOLES`); the excess over
one moment's bytes is reported as the allocator's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from model.configuration.network import ModelConfig
from model.configuration.training import TrainingConfig
from model.kernels.block_sizes import DEVICE_HEAD_CHUNK_BYTES, HEAD_CHUNK_BYTES, saved_probabilities
from model.kernels.host_allocator import LARGEST_POOLED_BYTES

RUNTIME_BYTES = 380 * 2**20
"""A trainer on a CPU with a network of one layer, 8 wide: interpreter, torch and its libraries."""

DEVICE_RUNTIME_BYTES = 600 * 2**20
"""Device memory that CUDA takes before training: the context, its kernels, cuBLAS's workspace."""

POOL_HOLES = 8
"""One of this many bytes in the C library's pool is unused: measured with three sizes of network."""

_FP32_BYTES, _HALF_BYTES = 4, 2
_MOMENTS = 2
_NORMED = 2
"""Saved fp32 numbers of a position in each layer, in widths: the inputs of the two norms."""
_SMALL_COMPUTED = 6
"""Saved numbers of a position in the computing precision, in widths: two norms' outputs, q, k, v, mixed."""
_GELU = 8
"""The same for both sides of the GELU."""
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "host_copy", "runtime", "allocator")
"""The parts of a memory estimate, as field names of MemoryEstimate without the unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Estimated bytes of one trainer at its peak, by purpose; on CUDA the device's memory, without the host copy."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    host_copy_bytes: int
    runtime_bytes: int
    allocator_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of all parts."""
        return sum(self.bytes_of(name) for name in PARTS)

    def bytes_of(self, part: str) -> int:
        """Return the bytes of one of PARTS."""
        size: int = getattr(self, f"{part}_bytes")
        return size


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlace:
    """Where training runs: on CUDA or a CPU, and in how many processes."""

    on_cuda: bool = False
    processes: int = 1


ON_CPU = TrainingPlace()


def count_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters, the position table included; exact."""
    width, biases = model.n_embd, model.bias
    layer = 12 * width**2 + (13 if biases else 2) * width
    return (vocab_size + model.block_size) * width + model.n_layer * layer + (2 if biases else 1) * width


def checkpoint_bytes(parameters: int) -> int:
    """Return the size of a committed checkpoint within a few KB: weights and both moments, in fp32."""
    return (1 + _MOMENTS) * _FP32_BYTES * parameters


def estimate_memory(
    model: ModelConfig,
    training: TrainingConfig,
    vocab_size: int,
    *,
    micro_batch: int,
    recompute: bool,
    place: TrainingPlace = ON_CPU,
) -> MemoryEstimate:
    """Return one trainer's peak with this micro-batch, in windows; `recompute` is activation checkpointing."""
    parameters = count_parameters(model, vocab_size)
    shards = place.processes if training.parallel == "fsdp" else 1
    share = -(-training.global_batch // place.processes)
    peak = _Peak(model, training, vocab_size, min(micro_batch, share), recompute, place)
    moments = list(peak.moments(has_gradients=share > micro_batch))
    fullest = max(moments, key=lambda pieces: sum(piece.bytes for piece in pieces))
    at_once = sum(piece.bytes for piece in fullest)
    pooled, mapped = (_peak_bytes(moments, pooled=pooled) for pooled in (True, False))
    taken = at_once if place.on_cuda else pooled + pooled // POOL_HOLES + mapped

    def of(name: str) -> int:
        return sum(piece.bytes for piece in fullest if piece.part == name)

    buckets = _FP32_BYTES * parameters if place.processes > 1 and shards == 1 else 0
    return MemoryEstimate(
        parameters_bytes=_FP32_BYTES * parameters // shards + of("parameters"),
        gradients_bytes=of("gradients") // shards + buckets,
        optimizer_bytes=_MOMENTS * _FP32_BYTES * parameters // shards,
        activations_bytes=of("activations"),
        logits_bytes=of("logits"),
        host_copy_bytes=0 if place.on_cuda else checkpoint_bytes(parameters) // place.processes,
        runtime_bytes=DEVICE_RUNTIME_BYTES if place.on_cuda else RUNTIME_BYTES,
        allocator_bytes=taken - at_once,
    )


def largest_micro_batch(
    model: ModelConfig,
    training: TrainingConfig,
    vocab_size: int,
    *,
    memory_bytes: int,
    recompute: bool,
    place: TrainingPlace = ON_CPU,
) -> int | None:
    """Halve a process's share of the global batch until it fits `memory_bytes` of each process; None if one does not.

    Returns windows.
    """
    windows = -(-training.global_batch // place.processes)
    while windows:
        estimate = estimate_memory(model, training, vocab_size, micro_batch=windows, recompute=recompute, place=place)
        if estimate.total_bytes <= memory_bytes:
            return windows
        windows //= 2
    return None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of one purpose at one moment, allocated in blocks of `block_bytes`."""

    part: str
    bytes: int
    block_bytes: int


def _peak_bytes(moments: list[list[_Piece]], *, pooled: bool) -> int:
    return max(
        sum(piece.bytes for piece in pieces if (piece.block_bytes < LARGEST_POOLED_BYTES) == pooled)
        for pieces in moments
    )


class _Peak:
    """The memory of one micro-batch besides weights and optimizer moments."""

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        vocab_size: int,
        windows: int,
        recompute: bool,
        place: TrainingPlace,
    ) -> None:
        self.model, self.vocab_size, self.windows, self.recompute = model, vocab_size, windows, recompute
        self.on_cuda = place.on_cuda
        self.is_fused = training.kernels == "fused"
        self.is_half = training.precision != "fp32"
        is_bf16 = training.precision == "bf16"
        self.is_block_fused = self.is_fused and is_bf16 and not (place.on_cuda or training.compile)
        self.number = _HALF_BYTES if self.is_half else _FP32_BYTES
        self.table = vocab_size * model.n_embd
        self.positions = windows * model.block_size
        self.fp32 = _FP32_BYTES * self.positions * model.n_embd
        self.computed = self.number * self.positions * model.n_embd

    def moments(self, *, has_gradients: bool) -> Iterator[list[_Piece]]:
        """Yield the pieces at the head, at the start of the backward pass, and at its end."""
        table = _FP32_BYTES * self.table
        earlier = list(self._gradients()) if has_gradients else []
        saved = [*self._half_weights(), *self._activations()]
        fused = self.is_fused
        yield [*earlier, *saved, *self._head()]
        head_gradients = [_Piece("gradients", table * (2 if fused else 1), table)]
        if fused:
            head_gradients.append(_Piece("logits", 2 * self.fp32, self.fp32))
        yield [*earlier, *saved, *head_gradients, *self._layer_backward()]
        yield [*self._gradients(), _Piece("gradients", table * (2 if has_gradients else 1), table)]

    def _gradients(self) -> Iterator[_Piece]:
        rest = count_parameters(self.model, self.vocab_size) - self.table
        yield _Piece("gradients", _FP32_BYTES * self.table, _FP32_BYTES * self.table)
        yield _Piece("gradients", _FP32_BYTES * rest, _FP32_BYTES * 4 * self.model.n_embd**2)

    def _half_weights(self) -> Iterator[_Piece]:
        if self.is_half:
            layers = 1 if self.recompute and self.is_block_fused else self.model.n_layer
            matrices = 12 * self.model.n_embd**2
            yield _Piece("parameters", _HALF_BYTES * layers * matrices, _HALF_BYTES * matrices // 3)
            if not self.is_fused:
                yield _Piece("parameters", _HALF_BYTES * self.table, _HALF_BYTES * self.table)

    def _activations(self) -> Iterator[_Piece]:
        full = 1 if self.recompute else self.model.n_layer
        for piece in self._layer():
            yield _Piece("activations", full * piece.bytes, piece.block_bytes)
        if self.recompute:
            yield _Piece("activations", self.model.n_layer * self.fp32, self.fp32)
        # The last norm's input and output, and dropout after the embedding.
        last = self.fp32 + self.computed + (self.fp32 if self.model.dropout else 0)
        yield _Piece("activations", last, self.fp32)

    def _layer(self) -> Iterator[_Piece]:
        yield _Piece("activations", _NORMED * self.fp32, self.fp32)
        yield _Piece("activations", _SMALL_COMPUTED * self.computed, self.computed)
        yield _Piece("activations", _GELU * self.computed, 4 * self.computed)
        if self.model.dropout:
            yield _Piece("activations", 2 * self.computed, self.computed)
        if probabilities := self._probabilities():
            blocks = 4 if self.is_block_fused else 1
            yield _Piece("activations", probabilities, probabilities // blocks)

    def _probabilities(self) -> int:
        time, heads = self.model.block_size, self.windows * self.model.n_head
        if self.is_block_fused:
            return _HALF_BYTES * heads * saved_probabilities(time) * (2 if self.model.dropout else 1)
        written_out = self.model.dropout and not self.on_cuda
        return 3 * self.number * heads * time**2 if written_out else 0

    def _layer_backward(self) -> Iterator[_Piece]:
        yield _Piece("activations", 2 * self.fp32, self.fp32)
        yield _Piece("activations", 8 * self.computed, 4 * self.computed)

    def _head(self) -> Iterator[_Piece]:
        if not self.is_fused:
            logits = _FP32_BYTES * self.positions * self.vocab_size
            yield _Piece("logits", 3 * logits, logits)
            return
        table, number = self.table, self.number
        yield _Piece("logits", self.fp32, self.fp32)
        yield _Piece("gradients", _FP32_BYTES * table, _FP32_BYTES * table)
        share = _FP32_BYTES if self.on_cuda else number
        yield _Piece("gradients", share * table, share * table)
        if self.is_half or self.on_cuda:
            yield _Piece("logits", number * table, number * table)
        yield self._chunk()

    def _chunk(self) -> _Piece:
        number, positions = self.number, self.positions
        size = DEVICE_HEAD_CHUNK_BYTES // number if self.on_cuda else HEAD_CHUNK_BYTES // _FP32_BYTES
        rows = min(positions, max(1, size // self.vocab_size))
        if self.on_cuda:
            each, largest = 3 * number + 2 * _FP32_BYTES, _FP32_BYTES
        else:  # one buffer, overwritten in place; a product in half precision makes a reordered copy
            each, largest = _FP32_BYTES, number
        return _Piece("logits", each * rows * self.vocab_size, largest * rows * self.vocab_size)
