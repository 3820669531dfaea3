"""Whether a trainer fits into the memory, with which micro-batch, and whether its checkpoints fit into the store."""

import os
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cairn.model.configuration.training import TrainingConfig
from cairn.model.estimates import size_estimate
from cairn.model.estimates.size_estimate import MemoryEstimate, TrainingPlace, largest_micro_batch
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine import machine_speed, process_memory
from cairn.tasks.policy.attempt_sizes import MARGIN, AttemptSizes, MemoryRoom
from cairn.tasks.trainer.trainer_group import TrainerGroup

_BESIDE_KEPT = 2
"""One checkpoint on its way, and one that is superseded and not yet deleted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AvailableMemory:
    """Bytes that each trainer may take, None if unknown, and where they would train."""

    bytes: int | None
    place: TrainingPlace


def available_memory(training: TrainingConfig, group: TrainerGroup, *, root: Path = Path("/")) -> AvailableMemory:
    """Return the memory of the system, or of the CUDA device; the processes of one machine share it."""
    on_cuda = machine_speed.trains_on_cuda(training.device)
    place = TrainingPlace(on_cuda=on_cuda, processes=group.size, evaluates=True)
    if on_cuda:
        return AvailableMemory(bytes=machine_speed.free_device_bytes(training.device), place=place)
    free = process_memory.available_memory_bytes(os.getpid(), root=root)
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
    micro_batch, recompute, place = sizes.micro_batch, sizes.activation_checkpointing, memory.place
    return size_estimate.estimate_memory(
        config.model, config.training, vocab_size, micro_batch=micro_batch, recompute=recompute, place=place
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
    if needed <= memory.bytes:
        return
    leanest = possible[estimates.index(needed)]
    largest = partial(largest_micro_batch, leanest.model, leanest.training, vocab_size, memory_bytes=memory.bytes)
    most = largest(recompute=sizes.activation_checkpointing, place=memory.place)
    recomputed = None if most else largest(recompute=True, place=memory.place)
    cure = "not even 1 fits, with training.activation_checkpointing = true neither: train a smaller model"
    if most:
        cure = f"rule: at most {most} fits"
    elif recomputed:
        cure = f"not even 1 fits, but {recomputed} with training.activation_checkpointing = true"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRoom:
    """What a run's checkpoints take: how many retention keeps at most, and what they need beside those that are there.

    `free_bytes` is what the store's disk has, None where it has none to ask.
    """

    bytes_each: int
    kept_at_most: int
    needed_bytes: int
    free_bytes: int | None


def store_room(store: ObjectStore, state: RunState, config: RunConfig, vocab_size: int) -> StoreRoom:
    """Return the room that the checkpoints of a run take, beside those that it has already."""
    rules, total, folder = config.checkpoint, config.training.steps, store.local_path("runs")
    commits, milestones = -(-total // rules.every_steps), total // rules.keep_every if rules.keep_every else 0
    kept = min(commits, rules.keep_last + rules.keep_best + milestones)
    each = size_estimate.checkpoint_bytes(config.model, config.training, vocab_size)
    there = sum(record.committed.bytes for record in state.live_checkpoints)
    most = each * (kept + _BESIDE_KEPT if rules.every_seconds else min(commits, kept + _BESIDE_KEPT))
    disk = next(parent for parent in folder.parents if parent.is_dir()) if folder else None
    free = shutil.disk_usage(disk).free if disk else None
    return StoreRoom(bytes_each=each, kept_at_most=kept, needed_bytes=max(0, most - there), free_bytes=free)


def require_room(store: ObjectStore, room: StoreRoom) -> None:
    """Raise `InvalidConfiguration` if the store's disk cannot hold what retention keeps."""
    if room.free_bytes is not None and room.needed_bytes > room.free_bytes:
        raise InvalidConfiguration(
            f"store {store.url}: {room.needed_bytes / 1e9:.3g} GB are needed for checkpoints of "
            f"{room.bytes_each / 1e9:.3g} GB, {room.free_bytes / 1e9:.3g} GB are free; free space, lower "
            "checkpoint.keep_last, keep_best or raise keep_every, or choose another --store"
        )
