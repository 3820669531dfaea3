"""The sizes with which a run goes on after out-of-memory: the first lighter ones that fit. Pure functions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from model.configuration.micro_batches import smaller_micro_batch
from model.configuration.network import ModelConfig
from model.configuration.training import Parallel, TrainingConfig
from model.estimates.size_estimate import TrainingPlace, estimate_memory
from tasks.policy.attempt_sizes import AttemptSizes

MARGIN = 0.1
"""The share of the memory that is left free where a micro-batch is chosen, because the estimate is inexact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRoom:
    """Bytes that each trainer may take, and from what its need is estimated."""

    bytes: int
    model: ModelConfig
    training: TrainingConfig
    vocab_size: int
    place: TrainingPlace

    def estimate(self, sizes: AttemptSizes) -> int:
        """Return the bytes that a trainer of these sizes takes at its peak."""
        return estimate_memory(
            self.model,
            self.training,
            self.vocab_size,
            micro_batch=sizes.micro_batch,
            recompute=sizes.activation_checkpointing,
            place=self.place,
        ).total_bytes


def lighter_sizes(
    now: AttemptSizes, *, global_batch: int, processes: int = 1, mode: Parallel = "ddp", halves_first: bool = False
) -> list[AttemptSizes]:
    """Return what takes less memory than `now`, the preferred first: what keeps the bits, unless `halves_first`."""
    halved = list(_halved(now, global_batch, processes, mode))
    if now.activation_checkpointing:
        return halved
    recomputed = [replace(sizes, activation_checkpointing=True) for sizes in (now, *halved)]
    return [*halved, *recomputed] if halves_first else recomputed


def choose_lighter(now: AttemptSizes, lighter: Sequence[AttemptSizes], room: MemoryRoom | None) -> AttemptSizes | None:
    """Return the first of `lighter` that is estimated to fit, the last if none is; the first if nothing is known.

    Bits are given up only where keeping them cannot fit, and then with `MARGIN` to spare, so that they change once.
    """
    for sizes in lighter:
        share = 1.0 if sizes.micro_batch == now.micro_batch else 1.0 - MARGIN
        if room is None or room.estimate(sizes) <= room.bytes * share:
            return sizes
    return lighter[-1] if lighter else None


def _halved(now: AttemptSizes, global_batch: int, processes: int, mode: Parallel) -> Iterator[AttemptSizes]:
    smaller = smaller_micro_batch(global_batch, now.micro_batch, processes=processes, mode=mode)
    while smaller:
        yield replace(now, micro_batch=smaller)
        smaller = smaller_micro_batch(global_batch, smaller, processes=processes, mode=mode)
