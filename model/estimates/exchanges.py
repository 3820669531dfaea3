"""The collective calls of one optimizer step of several processes, from shapes alone. Imports no torch.

They are those of `parallel`, and of PyTorch's `fully_shard` as it is used there; probes and checkpoints come besides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cairn.model.configuration.adapters import count_trained
from cairn.model.configuration.network import ModelConfig, Parameter, parameter_table
from cairn.model.configuration.training import TrainingConfig, split_batch
from cairn.model.estimates.step_memory import FP32_BYTES, HALF_BYTES
from cairn.model.kernels.block_sizes import EXCHANGE_BYTES

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
    passes = len(split_batch(training.global_batch, micro_batch, processes=processes, mode=training.parallel)[0])
    if processes == 1:
        return ()
    table, losses_bytes = parameter_table(model, vocab_size), FP32_BYTES * processes * (passes + 1)
    if training.parallel == "ddp":
        counts = count_trained(model, training.lora) if training.lora else [row.count for row in table]
        sizes = [FP32_BYTES * count for count in counts]
        buckets = [_rounded(sum(sizes[bucket]), FP32_BYTES * processes) for bucket in exchanged_together(sizes)]
        adding, reduced = Exchange(operation="all_to_all", calls=len(buckets), bytes=sum(buckets)), _FLAGS
        gathers, gathered_bytes = len(buckets), sum(buckets)
    else:  # a layer is gathered for the forward and for the backward pass
        layers, whole = (sum(_cut(row, processes) for row in table if row.name.startswith(of)) for of in ("h.", ""))
        rest, number = FP32_BYTES * (whole - layers), FP32_BYTES if training.precision == "fp32" else HALF_BYTES
        adding = Exchange(operation="reduce_scatter", calls=model.n_layer + 1, bytes=FP32_BYTES * whole)
        norms = (FP32_BYTES * len(table), *((FP32_BYTES,) if training.precision == "fp16" else ()))  # and its scaler's
        reduced, rest_gathers = (*_FLAGS, *norms), 1 if training.kernels == "fused" else 2
        gathers = passes * (rest_gathers + 2 * model.n_layer)
        gathered_bytes = passes * (rest_gathers * rest + 2 * number * layers)
    gathering = Exchange(operation="all_gather", calls=gathers + 1, bytes=gathered_bytes + losses_bytes)
    return gathering, adding, Exchange(operation="all_reduce", calls=len(reduced), bytes=sum(reduced))


def exchanged_together(sizes: Sequence[int]) -> Iterator[slice]:
    """Group gradients of these bytes so that one exchange moves some megabytes; no bit depends on the grouping."""
    begin = together = 0
    for place, size in enumerate(sizes):
        if place > begin and together + size > EXCHANGE_BYTES:
            yield slice(begin, place)
            begin, together = place, 0
        together += size
    if sizes:
        yield slice(begin, len(sizes))


def _cut(row: Parameter, processes: int) -> int:
    """Return the numbers of a tensor with as many rows for each process, the last of them empty."""
    return _rounded(row.shape[0], processes) * (row.count // row.shape[0])


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
