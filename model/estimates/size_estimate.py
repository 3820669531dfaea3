"""A network's parameters, one trainer's peak memory, and what several exchange, from shapes alone. Imports no torch.

Left out: what a compiler fuses away, prefetched batches, and the memory of evaluator commands. The collective calls of
a step are those of `parallel`, and of PyTorch's `fully_shard` as used there; probes and checkpoints come besides.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil

from cairn.model.configuration import training as batches
from cairn.model.configuration.network import ModelConfig, parameter_table
from cairn.model.configuration.training import OptimizerName, TrainingConfig, count_trained
from cairn.model.estimates.step_memory import FP32_BYTES, HALF_BYTES, Piece, StepMemory, held_out_moments
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
TRACED_ERROR = 0.03
"""The most by which an estimate for a GPU differs from the live tensors of a traced step (tests/cuda)."""


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


def trained_parameters(model: ModelConfig, training: TrainingConfig, vocab_size: int) -> int:
    """Return the number of parameters that are trained, and that a checkpoint holds; exact."""
    return sum(count_trained(model, training.lora)) if training.lora else count_parameters(model, vocab_size)


def moment_bytes(model: ModelConfig, training: TrainingConfig, vocab_size: int) -> int:
    """Return the size of what the optimizer keeps, but for its counters, in fp32."""
    each = _MOMENTS[training.optimizer]
    if training.lora is not None:
        return FP32_BYTES * each * trained_parameters(model, training, vocab_size)
    table = parameter_table(model, vocab_size)
    halved = sum(row.count for row in table if training.optimizer == "muon" and row.kind == "matrix")
    return FP32_BYTES * (each * sum(row.count for row in table) - halved)


def checkpoint_bytes(model: ModelConfig, training: TrainingConfig, vocab_size: int) -> int:
    """Return the size of a committed checkpoint within a few KB: weights and moments, in fp32."""
    return FP32_BYTES * trained_parameters(model, training, vocab_size) + moment_bytes(model, training, vocab_size)


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
    parameters, trained = count_parameters(model, vocab_size), trained_parameters(model, training, vocab_size)
    shards = place.processes if training.parallel == "fsdp" else 1
    share, on_cuda, workers = -(-training.global_batch // place.processes), place.on_cuda, place.workers
    windows, sizes = min(micro_batch, share), {"parameters": trained, "shards": shards}
    step = StepMemory(model, training, vocab_size, windows, recompute, on_cuda=on_cuda, **sizes)
    # Partial sums of gradients beside the one being made, of each worker.
    sums = (ceil(ceil(share / micro_batch) / workers) - 1).bit_length()
    held_out = list(held_out_moments(model, vocab_size, on_cuda=on_cuda, is_masked=training.mask_documents))
    moments = [pieces * workers for pieces in step.moments(sums=min(sums, 1) if shards > 1 else sums)]
    moments += held_out if training.probe_every_steps else []
    # Of replicated processes: gradients, what is sent of them, and what is received.
    exchanged = 3 * FP32_BYTES * max(min(block_sizes.EXCHANGE_BYTES // FP32_BYTES, trained), step.trained_table)
    exchanged = exchanged if place.processes > shards else 0
    adapted = FP32_BYTES * parameters if training.lora and not on_cuda else 0
    moments.append([Piece("parameters", 2 * adapted, adapted)])  # a start reads the weights beside adapters twice
    if on_cuda and exchanged:  # where the backward pass has left the memory that the exchange takes
        moments.append([*step.gradients(), Piece("gradients", exchanged, exchanged)])
    fullest = max(moments, key=lambda pieces: sum(piece.bytes for piece in pieces))
    at_once = sum(piece.bytes for piece in fullest)
    # On a CPU the C library keeps small freed blocks and returns large ones: the peaks of both kinds add up.
    largest = block_sizes.LARGEST_POOLED_BYTES
    pooled = max(sum(piece.bytes for piece in pieces if piece.block_bytes < largest) for pieces in moments)
    mapped = max(sum(piece.bytes for piece in pieces if piece.block_bytes >= largest) for pieces in moments)
    holes = AUTOCAST_POOL_HOLES if step.is_half and not step.is_block_fused else POOL_HOLES
    taken = at_once if on_cuda else pooled + pooled // (SHARDED_POOL_HOLES if shards > 1 else holes) + mapped
    of = {part: sum(piece.bytes for piece in fullest if piece.part == part) for part in PARTS}
    measuring = max(sum(piece.bytes for piece in pieces) for pieces in held_out)
    evaluator = DEVICE_RUNTIME_BYTES + FP32_BYTES * parameters + measuring
    if not on_cuda:  # the checkpoint is there twice while it is copied, and what is freed then is kept
        evaluator = (RUNTIME_BYTES + 2 * FP32_BYTES * parameters + adapted + measuring) // place.processes
    return MemoryEstimate(
        parameters_bytes=FP32_BYTES * (parameters + (trained if training.lora else 0)) // shards + of["parameters"],
        gradients_bytes=of["gradients"] + (0 if on_cuda else exchanged),
        optimizer_bytes=moment_bytes(model, training, vocab_size) // shards,
        activations_bytes=of["activations"],
        logits_bytes=of["logits"],
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
    windows = batches.first_micro_batch(batch, processes=processes, mode=mode)
    while windows:
        estimate = estimate_memory(model, training, vocab_size, micro_batch=windows, recompute=recompute, place=place)
        if estimate.total_bytes <= memory_bytes:
            return windows
        windows = batches.smaller_micro_batch(batch, windows, processes=processes, mode=mode)
    return None


_FLAGS = (8, 8)
"""Bytes of each step's flags: whether its batch can be used, and whether to stop after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A collective operation's calls in one step, and the bytes of the whole tensors that they cut, join or add up."""

    operation: str
    calls: int
    bytes: int


def step_exchanges(
    model: ModelConfig, training: TrainingConfig, vocab_size: int, *, micro_batch: int, processes: int
) -> tuple[Exchange, ...]:
    """Return what each step of so many processes exchanges; raises InvalidInput if they cannot share its batch."""
    shared = batches.split_batch(training.global_batch, micro_batch, processes=processes, mode=training.parallel)
    if processes == 1:
        return ()
    table, passes = parameter_table(model, vocab_size), len(shared[0])
    if training.parallel == "ddp":
        counts = count_trained(model, training.lora) if training.lora else [row.count for row in table]
        sizes = [FP32_BYTES * count for count in counts]
        buckets = [_rounded(sum(sizes[bucket]), FP32_BYTES * processes) for bucket in exchanged_together(sizes)]
        adding, reduced = Exchange(operation="all_to_all", calls=len(buckets), bytes=sum(buckets)), _FLAGS
        gathers, gathered_bytes = len(buckets), sum(buckets)
    else:  # a layer is gathered for the forward and for the backward pass
        # Each tensor has as many rows for each process, the last of them empty.
        cut = {row.name: _rounded(row.shape[0], processes) * (row.count // row.shape[0]) for row in table}
        layers, whole = (sum(count for name, count in cut.items() if name.startswith(of)) for of in ("h.", ""))
        rest, number = FP32_BYTES * (whole - layers), FP32_BYTES if training.precision == "fp32" else HALF_BYTES
        adding = Exchange(operation="reduce_scatter", calls=model.n_layer + 1, bytes=FP32_BYTES * whole)
        norms = (FP32_BYTES * len(table), *((FP32_BYTES,) if training.precision == "fp16" else ()))  # and its scaler's
        reduced, rest_gathers = (*_FLAGS, *norms), 1 if training.kernels == "fused" else 2
        gathers = passes * (rest_gathers + 2 * model.n_layer)
        gathered_bytes = passes * (rest_gathers * rest + 2 * number * layers)
    gathered_bytes += FP32_BYTES * processes * (passes + 1)  # the losses
    gathering = Exchange(operation="all_gather", calls=gathers + 1, bytes=gathered_bytes)
    return gathering, adding, Exchange(operation="all_reduce", calls=len(reduced), bytes=sum(reduced))


def exchanged_together(sizes: Sequence[int]) -> Iterator[slice]:
    """Group gradients of these bytes so that one exchange moves some megabytes; no bit depends on the grouping."""
    begin = together = 0
    for place, size in enumerate(sizes):
        if place > begin and together + size > block_sizes.EXCHANGE_BYTES:
            yield slice(begin, place)
            begin, together = place, 0
        together += size
    if sizes:
        yield slice(begin, len(sizes))


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
