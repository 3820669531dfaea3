"""Estimates a GPT-2's parameters and one trainer's peak memory from shapes alone. Imports no torch.

Left out: what a compiler fuses away, and prefetched batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from model.configuration.micro_batches import first_micro_batch, smaller_micro_batch
from model.configuration.network import ModelConfig
from model.configuration.training import TrainingConfig
from model.kernels.block_sizes import DEVICE_HEAD_CHUNK_BYTES, EXCHANGE_BYTES, HEAD_CHUNK_BYTES, saved_probabilities
from model.kernels.host_allocator import LARGEST_POOLED_BYTES

RUNTIME_BYTES = 380 * 2**20
"""A trainer on a CPU with a network of one layer, 8 wide: interpreter, torch and its libraries."""

DEVICE_RUNTIME_BYTES = 600 * 2**20
"""Device memory that CUDA takes before training: the context, its kernels, cuBLAS's workspace."""

POOL_HOLES = 8
"""One of this many bytes in the C library's pool is unused: measured with three sizes of network."""

_FP32_BYTES, _HALF_BYTES = 4, 2
_MOMENTS = 2
"""Numbers that AdamW keeps for each parameter."""
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
    sums = (ceil(share / micro_batch) - 1).bit_length()  # partial sums of gradients beside the one being made
    moments = list(peak.moments(sums=min(sums, 1) if shards > 1 else sums))
    fullest = max(moments, key=lambda pieces: sum(piece.bytes for piece in pieces))
    at_once = sum(piece.bytes for piece in fullest)
    # On a CPU the C library keeps small freed blocks and returns large ones: the peaks of both kinds add up.
    pooled, mapped = (
        max(sum(piece.bytes for piece in pieces if piece.is_pooled == is_pooled) for pieces in moments)
        for is_pooled in (True, False)
    )
    taken = at_once if place.on_cuda else pooled + pooled // POOL_HOLES + mapped

    def of(name: str) -> int:
        return sum(piece.bytes for piece in fullest if piece.part == name)

    exchanged = 0
    if place.processes > 1 and shards == 1:
        exchanged = 3 * max(min(EXCHANGE_BYTES, _FP32_BYTES * parameters), _FP32_BYTES * vocab_size * model.n_embd)
    # Until the last micro-batch has been added, sharded processes keep whole gradients.
    gradients = of("gradients") if sums else of("gradients") // shards
    return MemoryEstimate(
        parameters_bytes=_FP32_BYTES * parameters // shards + of("parameters"),
        gradients_bytes=gradients + exchanged,
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
    """Halve a process's share of the global batch until it fits `memory_bytes` of each process; None if none does.

    Returns windows.
    """
    batch, processes, mode = training.global_batch, place.processes, training.parallel
    windows = first_micro_batch(batch, processes=processes, mode=mode)
    while windows:
        estimate = estimate_memory(model, training, vocab_size, micro_batch=windows, recompute=recompute, place=place)
        if estimate.total_bytes <= memory_bytes:
            return windows
        windows = smaller_micro_batch(batch, windows, processes=processes, mode=mode)
    return None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of one purpose at one moment, allocated in blocks of `block_bytes`."""

    part: str
    bytes: int
    block_bytes: int

    @property
    def is_pooled(self) -> bool:
        return self.block_bytes < LARGEST_POOLED_BYTES


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

    def moments(self, *, sums: int) -> Iterator[list[_Piece]]:
        """Yield the pieces at the head, at the start of the backward pass, and at its end, beside so many gradients."""
        table = _FP32_BYTES * self.table
        earlier = list(self._gradients()) * sums
        saved = [*self._half_weights(), *self._activations()]
        yield [*earlier, *saved, *self._head()]
        # Embedding and head share one table: each makes a gradient of it before the two are added.
        head_gradients = [_Piece("gradients", table * (2 if self.is_fused else 1), table)]
        if self.is_fused:
            head_gradients.append(_Piece("logits", 2 * self.fp32, self.fp32))
        # The gradients between the parts of a layer.
        between = [_Piece("activations", 2 * self.fp32, self.fp32)]
        between.append(_Piece("activations", 8 * self.computed, 4 * self.computed))
        yield [*earlier, *saved, *head_gradients, *between]
        others = list(self._gradients()) * max(sums - 1, 0)  # the newest sum is added to in place
        yield [*self._gradients(), *others, _Piece("gradients", table * (2 if sums else 1), table)]

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
        yield _Piece("activations", 2 * self.fp32, self.fp32)  # the inputs of the two norms
        yield _Piece("activations", 6 * self.computed, self.computed)  # the norms' outputs, q, k, v, mixed
        yield _Piece("activations", 8 * self.computed, 4 * self.computed)  # both sides of the GELU
        if self.model.dropout:
            yield _Piece("activations", 2 * self.computed, self.computed)
        time, heads = self.model.block_size, self.windows * self.model.n_head
        if self.is_block_fused:
            probabilities = _HALF_BYTES * heads * saved_probabilities(time) * (2 if self.model.dropout else 1)
            yield _Piece("activations", probabilities, probabilities // 4)
        elif self.model.dropout and not self.on_cuda:  # three numbers for each pair of positions
            probabilities = 3 * self.number * heads * time**2
            yield _Piece("activations", probabilities, probabilities)

    def _head(self) -> Iterator[_Piece]:
        if not self.is_fused:
            logits = _FP32_BYTES * self.positions * self.vocab_size
            yield _Piece("logits", 3 * logits, logits)  # log-softmax, gradient of the losses, that of the logits
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
