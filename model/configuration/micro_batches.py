"""How a step's batch is cut into micro-batches, and which process computes which of them.

The micro-batch is the unit in which gradients are added up, along one binary tree over micro-batch indices
(`parallel`). A replicated process computes a whole subtree, so the same sum comes out of any number of processes:
each has the same number of micro-batches, and that is a power of two. Sharded processes each have an equal number of
smaller parts instead, because all of them must run every forward.
"""

from functools import cache
from math import ceil

from cairn.model.configuration.training import Parallel
from cairn.model.errors import InvalidInput


@cache
def split_batch(
    global_batch: int, micro_batch: int, *, processes: int = 1, mode: Parallel = "ddp"
) -> tuple[tuple[slice, ...], ...]:
    """Return, by process, the rows of each of its micro-batches; raises InvalidInput naming the numbers that can."""
    if mode == "fsdp" and processes > 1:  # shares differ by one row at most; each has the parts that the largest needs
        count = ceil(ceil(global_batch / processes) / micro_batch)
        shares = [_cut(slice(0, global_batch), rank, processes) for rank in range(processes)]
        return tuple(tuple(_cut(share, part, count) for part in range(count)) for share in shares)
    count = ceil(global_batch / micro_batch)
    if processes not in possible_processes(global_batch, micro_batch):
        possible = ", ".join(map(str, possible_processes(global_batch, micro_batch)))
        raise InvalidInput(
            f"{processes} processes cannot share {count} micro-batch{'es' if count > 1 else ''} "
            f"(global_batch={global_batch}, micro_batch={micro_batch}) so that the sum of gradients stays the same; "
            f"processes that can: {possible}. "
            "Use as many, or open a run with another training.micro_batch, or training.parallel = 'fsdp'"
        )
    each = count // processes
    parts = [slice(i * micro_batch, min((i + 1) * micro_batch, global_batch)) for i in range(count)]
    return tuple(tuple(parts[rank * each : (rank + 1) * each]) for rank in range(processes))


def possible_processes(global_batch: int, micro_batch: int) -> tuple[int, ...]:
    """Return the numbers of replicated processes that give the same bits as one, smallest first."""
    count = ceil(global_batch / micro_batch)
    halved = [count >> level for level in range(count.bit_length()) if count % (1 << level) == 0]
    return tuple(sorted({1, *halved}))


def first_micro_batch(global_batch: int, *, processes: int = 1, mode: Parallel = "ddp") -> int | None:
    """Return the largest micro-batch of which every process has at least one, or None if they cannot share any."""
    return _largest(global_batch, ceil(global_batch / processes), processes, mode)


def smaller_micro_batch(batch: int, micro_batch: int, *, processes: int = 1, mode: Parallel = "ddp") -> int | None:
    """Return the largest micro-batch up to half of this one that the processes can share, or None."""
    return _largest(batch, micro_batch // 2, processes, mode)


def _largest(global_batch: int, at_most: int, processes: int, mode: Parallel) -> int | None:
    sizes = range(at_most, 0, -1)
    if mode == "ddp" and processes > 1:
        return next((size for size in sizes if processes in possible_processes(global_batch, size)), None)
    return next(iter(sizes), None)


def _cut(rows: slice, place: int, places: int) -> slice:
    count = rows.stop - rows.start
    return slice(rows.start + count * place // places, rows.start + count * (place + 1) // places)
