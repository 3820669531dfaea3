"""The sizes an attempt trains with, and those that it goes on with after out-of-memory. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from cairn.model.configuration import training as batches
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import Parallel, TrainingConfig
from cairn.model.errors import InvalidInput
from cairn.storage.logs import run_entries, run_state
from cairn.tasks.configuration.settings import CheckpointConfig
from cairn.tasks.errors import TaskError

MARGIN = 0.1
"""The share of the memory that is left free where a micro-batch is chosen, because the estimate is inexact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSizes:
    """Windows in a micro-batch, and whether activations are recomputed in the backward pass."""

    micro_batch: int
    activation_checkpointing: bool


def sizes_of(started: run_entries.AttemptStarted) -> AttemptSizes:
    """Return the sizes that an attempt trains with."""
    return AttemptSizes(micro_batch=started.micro_batch, activation_checkpointing=started.activation_checkpointing)


def next_sizes(
    state: run_state.RunState, training: TrainingConfig, block_size: int, *, processes: int = 1, on_cpu: bool = True
) -> AttemptSizes:
    """Return the sizes of the run's next attempt, which include what earlier attempts changed after out-of-memory.

    The micro-batch is part of the arithmetic, so the first attempt's stays: the configured one, or that of `auto`, but
    not more than each of its processes has a share of. Raises `TaskError` if these processes cannot share it.
    """
    mode = training.parallel
    if state.attempts:
        micro_batch = state.attempts[-1].started.micro_batch
    else:
        largest = batches.first_micro_batch(training.global_batch, processes=processes, mode=mode)
        if (wanted := training.micro_batch) == "auto":
            wanted = batches.auto_micro_batch(training.global_batch, block_size, on_cpu=on_cpu)
        micro_batch = min(wanted, largest or 1)
    micro_batch = min(micro_batch, state.smallest_micro_batch or micro_batch)
    try:
        batches.split_batch(training.global_batch, micro_batch, processes=processes, mode=mode)
    except InvalidInput as error:
        raise TaskError(str(error)) from error
    recomputes = training.activation_checkpointing or state.recomputes_activations
    return AttemptSizes(micro_batch=micro_batch, activation_checkpointing=recomputes)


def most_workers(
    training: TrainingConfig, model: ModelConfig, sizes: AttemptSizes, *, processes: int, cores: int
) -> int:
    """Return how many micro-batches a process may compute at once; one on a device, and where numbers are drawn."""
    one_generator = model.draws_numbers or training.precision == "fp16"  # or one scaler
    one_network = training.compile or (training.parallel == "fsdp" and processes > 1)
    if training.device not in ("auto", "cpu") or one_generator or one_network:
        return 1
    passes = ceil(ceil(training.global_batch / processes) / sizes.micro_batch)
    return min(cores if training.workers == "auto" else training.workers, passes)


def segment_end(step: int, checkpoint: CheckpointConfig, *, total_steps: int, step_seconds: float | None) -> int:
    """Return the step to train to from `step`: the next multiple of `every_steps`, or before it after `every_seconds`.

    Multiples, where evaluations are scheduled, are never skipped; without `step_seconds` a segment has one step.
    """
    border = min(total_steps, (step // checkpoint.every_steps + 1) * checkpoint.every_steps)
    if checkpoint.every_seconds is None:
        return border
    steps = 1 if step_seconds is None else max(int(checkpoint.every_seconds / step_seconds), 1)
    return min(border, step + steps)


def stall_seconds(step: int, checkpoint: CheckpointConfig, *, total_steps: int, decides: bool) -> float | None:
    """Return how long training waits for the checkpoint before to commit at `step`, None for as long as it takes.

    Nothing is left out at the last step, where retention keeps each, and where an evaluation `decides` on the run.
    """
    is_milestone = bool(checkpoint.keep_every) and step % checkpoint.keep_every == 0
    return None if step == total_steps or is_milestone or decides else checkpoint.stall_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRoom:
    """Bytes that each trainer may take, and the estimate of those that one of some sizes takes at its peak."""

    bytes: int
    estimate: Callable[[AttemptSizes], int]


def lighter_sizes(
    now: AttemptSizes, *, global_batch: int, processes: int = 1, mode: Parallel = "ddp", halves_first: bool = False
) -> list[AttemptSizes]:
    """Return sizes of less memory than `now`, the preferred first: those that keep the bits, unless `halves_first`."""
    sizes = [now]
    while smaller := batches.smaller_micro_batch(global_batch, sizes[-1].micro_batch, processes=processes, mode=mode):
        sizes.append(replace(now, micro_batch=smaller))
    if now.activation_checkpointing:
        return sizes[1:]
    recomputed = [replace(one, activation_checkpointing=True) for one in sizes]
    return [*sizes[1:], *recomputed] if halves_first else recomputed


def choose_lighter(now: AttemptSizes, lighter: Sequence[AttemptSizes], room: MemoryRoom | None) -> AttemptSizes | None:
    """Return the first of `lighter` that is estimated to fit, the last if none is; the first if nothing is known.

    Bits are given up only where keeping them cannot fit, and then with `MARGIN` to spare, so that they change once.
    """
    for sizes in lighter:
        share = 1.0 if sizes.micro_batch == now.micro_batch else 1.0 - MARGIN
        if room is None or room.estimate(sizes) <= room.bytes * share:
            return sizes
    return lighter[-1] if lighter else None
