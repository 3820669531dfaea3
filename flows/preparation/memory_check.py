"""Whether a trainer fits into the available memory, and which micro-batch does, by `model.estimates.size_estimate`."""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from model.configuration.training import TrainingConfig
from model.estimates.size_estimate import MemoryEstimate, TrainingPlace, estimate_memory, largest_micro_batch
from tasks.configuration.run_configuration import RunConfig
from tasks.errors import InvalidConfiguration
from tasks.machine.machine_speed import free_device_bytes, trains_on_cuda
from tasks.machine.process_memory import available_memory_bytes
from tasks.policy.attempt_sizes import MARGIN, AttemptSizes, MemoryRoom
from tasks.trainer.trainer_group import TrainerGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class AvailableMemory:
    """Bytes that each trainer may take, None if unknown, and where they would train."""

    bytes: int | None
    place: TrainingPlace


def available_memory(training: TrainingConfig, group: TrainerGroup, *, root: Path = Path("/")) -> AvailableMemory:
    """Return the memory of the system, or of the CUDA device; the processes of one machine share it."""
    on_cuda = trains_on_cuda(training.device)
    place = TrainingPlace(on_cuda=on_cuda, processes=group.size, evaluates=True)
    if on_cuda:
        return AvailableMemory(bytes=free_device_bytes(training.device), place=place)
    free = available_memory_bytes(os.getpid(), root=root)
    return AvailableMemory(bytes=None if free is None else free // group.processes, place=place)


def memory_room(config: RunConfig, vocab_size: int, memory: AvailableMemory) -> MemoryRoom | None:
    """Return the memory of an attempt after out-of-memory beside a running evaluator, None if nobody knows."""
    if memory.bytes is None:
        return None
    alone = replace(memory, place=replace(memory.place, evaluates=False))
    return MemoryRoom(
        bytes=memory.bytes, estimate=lambda sizes: estimate_trainer(config, vocab_size, sizes, alone).total_bytes
    )


def estimate_trainer(
    config: RunConfig, vocab_size: int, sizes: AttemptSizes, memory: AvailableMemory
) -> MemoryEstimate:
    """Return the memory that one trainer of these sizes takes at its peak."""
    return estimate_memory(
        config.model,
        config.training,
        vocab_size,
        micro_batch=sizes.micro_batch,
        recompute=sizes.activation_checkpointing,
        place=memory.place,
    )


def require_memory(config: RunConfig, vocab_size: int, sizes: AttemptSizes, memory: AvailableMemory) -> None:
    """Raise `InvalidConfiguration` if a trainer of these sizes fits under none of the numerics still open."""
    if memory.bytes is None or not config.training.memory_check:
        return
    precisions = ["fp32", "bf16"] if config.training.precision == "auto" else [config.training.precision]
    kernels = ["stock", "fused"] if config.training.kernels == "auto" else [config.training.kernels]
    possible = [config.with_mode(precision=one, kernels=other) for one in precisions for other in kernels]
    estimates = [estimate_trainer(one, vocab_size, sizes, memory).total_bytes for one in possible]
    needed = min(estimates)
    if needed > memory.bytes:
        cure = _cure(possible[estimates.index(needed)], vocab_size, sizes, memory)
        raise InvalidConfiguration(
            f"training.micro_batch = {sizes.micro_batch}: an estimated {needed / 1e9:.3g} GB a process, "
            f"{memory.bytes / 1e9:.3g} GB are available; {cure}. training.memory_check = false tries it all the same"
        )


def choose_micro_batch(config: RunConfig, vocab_size: int, memory: AvailableMemory) -> int:
    """Return the first halving of a process's share that fits with `MARGIN`; 1 if none, all if memory is unknown."""
    training = config.training
    if memory.bytes is None:
        return -(-training.global_batch // memory.place.processes)
    room, recompute = int(memory.bytes * (1 - MARGIN)), training.activation_checkpointing
    fitting = largest_micro_batch(
        config.model, training, vocab_size, memory_bytes=room, recompute=recompute, place=memory.place
    )
    return fitting or 1


def _cure(config: RunConfig, vocab_size: int, sizes: AttemptSizes, memory: AvailableMemory) -> str:
    assert memory.bytes is not None
    largest = partial(
        largest_micro_batch, config.model, config.training, vocab_size, memory_bytes=memory.bytes, place=memory.place
    )
    most = largest(recompute=sizes.activation_checkpointing)
    if most is not None:
        return f"rule: at most {most} fits"
    recomputed = largest(recompute=True)
    if recomputed is not None:
        return f"not even 1 fits, but {recomputed} with training.activation_checkpointing = true"
    return "not even 1 fits, with training.activation_checkpointing = true neither: train a smaller model"
