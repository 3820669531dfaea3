"""Estimates a network's parameters and one trainer's peak memory from shapes alone. Imports no torch.

Left out: what a compiler fuses away, prefetched batches, and the memory of evaluator commands. A moment is a list of
pieces; a step's follow layers, head and gradient sum, a held-out loss's are evaluators' too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import ceil

from cairn.model.configuration.network import WIDENED, ModelConfig, layer_matrices, parameter_table
from cairn.model.configuration.training import OptimizerName, TrainingConfig, first_micro_batch, smaller_micro_batch
from cairn.model.kernels import block_sizes

RUNTIME_BYTES = 380 * 2**20
"""A trainer on a CPU with a network of one layer, 8 wide: interpreter, torch and its libraries."""
DEVICE_RUNTIME_BYTES = 600 * 2**20
"""Device memory that CUDA takes before training: the context, its kernels, cuBLAS's workspace."""
POOL_HOLES, AUTOCAST_POOL_HOLES, SHARDED_POOL_HOLES = 8, 4, 3
"""One of this many bytes in the C library's pool is unused: measured with three sizes of two networks; with blocks of
fp32 and of half precision between each other; and on two sharded processes, which gather and free layers all the time.
"""
_MOMENTS: Mapping[OptimizerName, int] = {"adamw": 2, "adam": 2, "muon": 2, "momentum": 1, "sgd": 0}
"""Numbers that an optimizer keeps for each parameter; Muon, which has the layers' matrices, one for each of theirs."""
FP32_BYTES, HALF_BYTES = 4, 2
_MULTIPROCESSORS = 132
"""Those of an H100: flash attention's deterministic backward pass has a sum of queries' gradients for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Estimated bytes of one trainer at its peak, by purpose; on CUDA the device's memory, without the host copy.

    `evaluator_bytes` are those of the process that evaluates on the same device, shared by the trainers of a CPU.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    host_copy_bytes: int
    runtime_bytes: int
    allocator_bytes: int
    evaluator_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of all parts."""
        return sum(self.bytes_of(name) for name in PARTS)

    def bytes_of(self, part: str) -> int:
        """Return the bytes of one of PARTS."""
        size: int = getattr(self, f"{part}_bytes")
        return size


PARTS = tuple(field.name.removesuffix("_bytes") for field in fields(MemoryEstimate))
"""The parts of a memory estimate, as field names of MemoryEstimate without the unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlace:
    """Where training runs: on CUDA or a CPU, in how many processes of how many workers, and beside an evaluator."""

    on_cuda: bool = False
    processes: int = 1
    workers: int = 1
    evaluates: bool = False


ON_CPU = TrainingPlace()


def count_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters, the position table included; exact."""
    return sum(row.count for row in parameter_table(model, vocab_size))


def moment_bytes(model: ModelConfig, training: TrainingConfig, vocab_size: int) -> int:
    """Return the size of what the optimizer keeps, but for its counters, in fp32."""
    each = _MOMENTS[training.optimizer]
    table = parameter_table(model, vocab_size)
    halved = sum(row.count for row in table if training.optimizer == "muon" and row.kind == "matrix")
    return FP32_BYTES * (each * sum(row.count for row in table) - halved)


def checkpoint_bytes(model: ModelConfig, training: TrainingConfig, vocab_size: int) -> int:
    """Return the size of a committed checkpoint within a few KB: weights and moments, in fp32."""
    return FP32_BYTES * count_parameters(model, vocab_size) + moment_bytes(model, training, vocab_size)


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
    share, on_cuda, workers = -(-training.global_batch // place.processes), place.on_cuda, place.workers
    windows, sizes = min(micro_batch, share), {"parameters": parameters, "shards": shards}
    step = StepMemory(model, training, vocab_size, windows, recompute, on_cuda=on_cuda, **sizes)
    # Partial sums of gradients beside the one being made, of each worker.
    sums = (ceil(ceil(share / micro_batch) / workers) - 1).bit_length()
    held_out = list(held_out_moments(model, vocab_size, on_cuda=on_cuda, is_masked=training.mask_documents))
    moments = [pieces * workers for pieces in step.moments(sums=min(sums, 1) if shards > 1 else sums)]
    moments += held_out if training.probe_every_steps else []
    fullest = max(moments, key=lambda pieces: sum(piece.bytes for piece in pieces))
    at_once = sum(piece.bytes for piece in fullest)
    # On a CPU the C library keeps small freed blocks and returns large ones: the peaks of both kinds add up.
    largest = block_sizes.LARGEST_POOLED_BYTES
    pooled = max(sum(piece.bytes for piece in pieces if piece.block_bytes < largest) for pieces in moments)
    mapped = max(sum(piece.bytes for piece in pieces if piece.block_bytes >= largest) for pieces in moments)
    holes = AUTOCAST_POOL_HOLES if step.is_half and not step.is_block_fused else POOL_HOLES
    taken = at_once if on_cuda else pooled + pooled // (SHARDED_POOL_HOLES if shards > 1 else holes) + mapped

    def of(name: str) -> int:
        return sum(piece.bytes for piece in fullest if piece.part == name)

    measuring = max(sum(piece.bytes for piece in pieces) for pieces in held_out)
    evaluator = DEVICE_RUNTIME_BYTES + FP32_BYTES * parameters + measuring
    if not on_cuda:  # the checkpoint is there twice while it is copied, and what is freed then is kept
        evaluator = (RUNTIME_BYTES + 2 * FP32_BYTES * parameters + measuring) // place.processes
    exchanged = 0
    if place.processes > 1 and shards == 1:
        bucket = min(block_sizes.EXCHANGE_BYTES, FP32_BYTES * parameters)
        exchanged = 3 * max(bucket, FP32_BYTES * vocab_size * model.n_embd)
    return MemoryEstimate(
        parameters_bytes=FP32_BYTES * parameters // shards + of("parameters"),
        gradients_bytes=of("gradients") + exchanged,
        optimizer_bytes=moment_bytes(model, training, vocab_size) // shards,
        activations_bytes=of("activations"),
        logits_bytes=of("logits"),
        host_copy_bytes=0 if on_cuda else checkpoint_bytes(model, training, vocab_size) // place.processes,
        runtime_bytes=DEVICE_RUNTIME_BYTES if on_cuda else RUNTIME_BYTES,
        allocator_bytes=taken - at_once,
        evaluator_bytes=evaluator if place.evaluates else 0,
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
    """Halve a process's share of the batch until it fits `memory_bytes`; returns windows, None if none does."""
    batch, processes, mode = training.global_batch, place.processes, training.parallel
    windows = first_micro_batch(batch, processes=processes, mode=mode)
    while windows:
        estimate = estimate_memory(model, training, vocab_size, micro_batch=windows, recompute=recompute, place=place)
        if estimate.total_bytes <= memory_bytes:
            return windows
        windows = smaller_micro_batch(batch, windows, processes=processes, mode=mode)
    return None


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one purpose at one moment, allocated in blocks of `block_bytes`."""

    part: str
    bytes: int
    block_bytes: int


class StepMemory:
    """The memory of one micro-batch besides weights and optimizer moments."""

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        vocab_size: int,
        windows: int,
        recompute: bool,
        *,
        parameters: int,
        on_cuda: bool,
        shards: int,
    ) -> None:
        self.model, self.vocab_size, self.windows, self.recompute = model, vocab_size, windows, recompute
        self.parameters, self.on_cuda, self.shards = parameters, on_cuda, shards
        self.is_fused = training.kernels == "fused"
        self.is_half = training.precision != "fp32"
        self.is_block_fused = self.is_fused and training.precision == "bf16" and not (on_cuda or training.compile)
        by_bounds = self.is_half and on_cuda and block_sizes.fits_flash(model.head_size) and not training.compile
        self.has_mask = training.mask_documents and not by_bounds
        # PyTorch's math kernel, which keeps all probabilities, in fp32.
        self.is_math = bool(model.dropout) and not (on_cuda or self.is_block_fused)
        if on_cuda:
            self.is_math = not self.is_half or model.head_size > block_sizes.WIDEST_FLASH_HEAD or self.has_mask
        self.number = HALF_BYTES if self.is_half else FP32_BYTES
        self.table = vocab_size * model.n_embd
        self.positions = windows * model.block_size
        self.fp32 = FP32_BYTES * self.positions * model.n_embd
        self.dropped = self.positions * model.n_embd if on_cuda else 0  # CUDA keeps what it dropped as bools
        self.computed = self.number * self.positions * model.n_embd
        self.attention = self.number * self.positions * model.attention_width
        self.inner = self.number * self.positions * model.n_inner
        self.pairs = windows * model.n_head * model.block_size**2

    def moments(self, *, sums: int) -> Iterator[list[Piece]]:
        """Yield the pieces at the head, at the start of the backward pass, and at its end, beside so many gradients."""
        table = FP32_BYTES * self.table
        earlier = list(self._gradients()) * sums
        weights = [*self._half_weights(), *self._gathered()]
        saved = [*weights, *self._activations()]
        # A layer that is computed again is there only in the backward pass; a CPU's peaks were measured with it.
        yield [*earlier, *weights, *self._activations(computes_again=not self.on_cuda), *self._head()]
        # Embedding and head share one table: each makes a gradient of it before the two are added.
        head_gradients = [Piece("gradients", table * (2 if self.is_fused else 1), table)]
        if self.is_fused:
            head_gradients.append(Piece("logits", 2 * self.fp32, self.fp32))
        # The gradients between the parts of a layer.
        between = [Piece("activations", 2 * self.fp32, self.fp32)]
        between.append(Piece("activations", 2 * WIDENED[self.model.feed_forward] * self.inner, self.inner))
        if self.is_math:
            between.append(Piece("activations", 2 * FP32_BYTES * self.pairs, FP32_BYTES * self.pairs))
        elif self.on_cuda:
            each = ceil(_MULTIPROCESSORS / (self.windows * self.model.n_head)) * self.fp32
            between.append(Piece("activations", each, each))
        yield [*earlier, *saved, *head_gradients, *between]
        others = list(self._gradients()) * max(sums - 1, 0)  # the newest sum is added to in place
        last = list(self._gradients(shards=1 if sums else self.shards))
        yield [*last, *others, *self._gathered(), Piece("gradients", table * (2 if sums else 1), table)]

    def _gradients(self, *, shards: int = 1) -> Iterator[Piece]:
        """Yield whole gradients; of several shards only that of the table is whole, which is the last to be made.

        Sharded processes keep whole ones too until the step's last micro-batch.
        """
        rest = self.parameters - self.table
        yield Piece("gradients", FP32_BYTES * self.table, FP32_BYTES * self.table)
        yield Piece("gradients", FP32_BYTES * rest // shards, FP32_BYTES * self.model.n_inner * self.model.n_embd)

    def _gathered(self) -> Iterator[Piece]:
        """Yield what a sharded process has gathered: the table, and two layers and their gradients with buffers."""
        if self.shards > 1:
            matrices = layer_matrices(self.model)
            yield Piece("parameters", FP32_BYTES * self.table, FP32_BYTES * self.table)
            yield Piece("parameters", 2 * 2 * self.number * matrices, self.number * matrices)
            yield Piece("gradients", 2 * FP32_BYTES * matrices, FP32_BYTES * matrices)

    def _half_weights(self) -> Iterator[Piece]:
        if self.is_half:
            layers = 1 if self.recompute and self.is_block_fused else self.model.n_layer
            layers = layers if self.shards == 1 else 0  # gathered in half precision
            matrices = layer_matrices(self.model)
            yield Piece("parameters", HALF_BYTES * layers * matrices, HALF_BYTES * matrices // 3)
            if not self.is_fused:
                yield Piece("parameters", HALF_BYTES * self.table, HALF_BYTES * self.table)

    def _activations(self, *, computes_again: bool = True) -> Iterator[Piece]:
        """Yield what layers keep for the backward pass, at most one of them where they are recomputed, and the rest."""
        model, fp32, dropout = self.model, self.fp32, self.model.dropout
        layer = [(2 * fp32, fp32)]  # the inputs of the two norms
        layer.append((2 * self.computed + 4 * self.attention, self.computed))  # norms, q, k, v, mixed
        # Both sides of the function; of SwiGLU gate, the other half, their product and, by autograd, the gate's SiLU.
        widened = WIDENED[model.feed_forward]
        layer.append(((widened + (1 if self.is_block_fused else widened)) * self.inner, self.inner))
        heads = self.positions * (model.attention_width + model.key_width)
        if self.is_block_fused:
            if model.qk_norm:  # queries and each head's keys before
                layer.append((2 * self.attention, 2 * self.attention))
            probabilities = block_sizes.saved_probabilities(model.block_size) * self.windows * model.n_head
            kept = HALF_BYTES * probabilities * (2 if dropout else 1)
            layer.append((kept, kept // 4))
        else:
            if model.norm == "rms" and model.norm_gain:  # the normalised values before their gain
                layer.append((2 * fp32, fp32))
            if model.qk_norm or model.positions == "rotary":  # beside the joint product, which holds the values
                layer.append((self.number * heads, self.number * heads))
            if model.qk_norm:  # queries and keys in fp32, where they are not so anyway, and before their gain
                layer.append((FP32_BYTES * heads * (self.is_half + model.norm_gain), FP32_BYTES * heads))
        if dropout:
            layer.append((2 * (self.dropped or self.computed), self.computed))
        # What attention keeps for the backward pass besides queries, keys, values and its result.
        if self.is_math:  # with dropout also what it draws, a bool on CUDA, and its result
            dropped = FP32_BYTES + (1 if self.on_cuda else FP32_BYTES) if dropout else 0
            layer.append(((FP32_BYTES + dropped) * self.pairs, FP32_BYTES * self.pairs))
            layer.append((3 * (fp32 - self.computed), fp32))
        elif self.has_mask and not self.is_block_fused:  # as numbers
            layer.append((self.number * self.pairs // model.n_head, self.pairs))
        for size, block in layer:
            yield Piece("activations", (computes_again if self.recompute else model.n_layer) * size, block)
        if self.recompute:
            yield Piece("activations", model.n_layer * fp32, fp32)
        if self.has_mask:  # of bools
            yield Piece("activations", self.pairs // model.n_head, self.pairs // model.n_head)
        # The last norm's input and output, and dropout after the embedding.
        yield Piece("activations", fp32 + self.computed + ((self.dropped or fp32) if dropout else 0), fp32)

    def _head(self) -> Iterator[Piece]:
        if not self.is_fused:
            logits = FP32_BYTES * self.positions * self.vocab_size
            yield Piece("logits", 3 * logits, logits)  # log-softmax, gradient of the losses, that of the logits
            return
        table, number = self.table, self.number
        yield Piece("logits", self.fp32, self.fp32)
        yield Piece("gradients", FP32_BYTES * table, FP32_BYTES * table)
        if not self.on_cuda:  # the product that is added to it
            yield Piece("gradients", number * table, number * table)
        if self.is_half or self.on_cuda:
            yield Piece("logits", number * table, number * table)
        size = block_sizes.HEAD_CHUNK_BYTES // FP32_BYTES
        each, largest = FP32_BYTES, number  # one buffer; a product in half precision makes a reordered copy
        if self.on_cuda:
            size = block_sizes.DEVICE_HEAD_CHUNK_BYTES // number
        rows = min(self.positions, max(1, size // self.vocab_size))
        if self.on_cuda:  # by Triton's one kernel: logits, their gradient, and that of the chunk before
            rows = ceil(self.positions / ceil(self.positions / rows))  # chunks are as equal as possible
            each, largest = (2 if rows == self.positions else 3) * number, number
        yield Piece("logits", each * rows * self.vocab_size, largest * rows * self.vocab_size)


def held_out_moments(model: ModelConfig, vocab_size: int, *, on_cuda: bool, is_masked: bool) -> Iterator[list[Piece]]:
    """Yield the pieces of a held-out loss in a layer and at the head, and of a sample: in fp32, without gradients."""
    windows = max(1, block_sizes.HELD_OUT_TOKENS // model.block_size)
    fp32 = FP32_BYTES * windows * model.block_size * model.n_embd
    pairs = windows * model.n_head * model.block_size**2
    inner = WIDENED[model.feed_forward] * FP32_BYTES * windows * model.block_size * model.n_inner
    layer = [Piece("activations", 3 * fp32 + 2 * inner, inner)]  # residual stream, a norm, the feed-forward part
    if on_cuda:  # the math kernel: scores, probabilities, and where they are to be 0
        layer = [Piece("activations", 9 * fp32 + (3 * FP32_BYTES + 1) * pairs, FP32_BYTES * pairs)]
    if is_masked:
        layer.append(Piece("activations", (1 + FP32_BYTES) * pairs // model.n_head, FP32_BYTES * pairs // model.n_head))
    yield layer
    rows = min(windows * model.block_size, max(1, block_sizes.HELD_OUT_CHUNK_BYTES // (FP32_BYTES * vocab_size)))
    chunk = FP32_BYTES * rows * vocab_size
    yield [Piece("activations", 2 * fp32, fp32), Piece("logits", 2 * chunk, chunk)]
    cache = 2 * FP32_BYTES * model.n_layer * model.block_size * model.key_width
    yield [Piece("activations", cache, cache)]
