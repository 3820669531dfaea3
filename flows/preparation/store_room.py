"""The room that a run's checkpoints take in its store, and whether the store's disk has it: an estimate."""

import math
import shutil
from dataclasses import dataclass

from cairn.model.estimates import size_estimate
from cairn.storage.logs import run_state
from cairn.storage.stores import object_store
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.policy.attempt_sizes import next_sizes
from cairn.tasks.text.format import format_quantity
from cairn.tasks.trainer.module_trial import try_module

_BESIDE_KEPT = 2
"""One checkpoint on its way, and one that is superseded and not yet deleted."""
_LATE = 2
"""One that is evaluated, and one that waits for that; with less room, a full store waits for the evaluator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRoom:
    """The room of a run's checkpoints: how many retention keeps at most, and the bytes beside those that are there.

    `late_bytes` is for those that a slow evaluator still needs, more the slower it is; `free_bytes` is free on the
    store's disk, None where there is no disk to ask.
    """

    bytes_each: int
    kept_at_most: int
    needed_bytes: int
    late_bytes: int
    free_bytes: int | None


def store_room(
    store: object_store.ObjectStore, state: run_state.RunState, config: RunConfig, vocab_size: int
) -> StoreRoom:
    """Return the room that the checkpoints of a run take, beside those that it has already."""
    rules, total = config.checkpoint, config.training.steps
    commits, milestones = -(-total // rules.every_steps), total // rules.keep_every if rules.keep_every else 0
    kept = min(commits, rules.keep_last + rules.keep_best + milestones)
    each = _checkpoint_bytes(state, config, vocab_size)
    there = sum(record.committed.bytes for record in state.live_checkpoints)
    most = math.inf if rules.every_seconds else commits
    needed, with_late = (each * min(most, kept + beside) for beside in (_BESIDE_KEPT, _BESIDE_KEPT + _LATE))
    late, needed, free = int(with_late - needed), max(0, int(needed) - there), free_bytes(store)
    return StoreRoom(bytes_each=each, kept_at_most=kept, needed_bytes=needed, late_bytes=late, free_bytes=free)


def _checkpoint_bytes(state: run_state.RunState, config: RunConfig, vocab_size: int) -> int:
    """Return the size of a checkpoint; a module's is that of its newest, or of a trial's state."""
    if not config.model.module:
        return size_estimate.checkpoint_bytes(config.model, config.training, vocab_size)
    if (newest := state.newest_committed) is not None:
        return newest.committed.bytes
    tried = try_module(config, vocab_size, next_sizes(state, config.training, config.model.block_size))
    return tried.parameters_bytes + tried.optimizer_bytes


def free_bytes(store: object_store.ObjectStore) -> int | None:
    """Return what is free on the store's disk, None where there is no disk to ask."""
    if (folder := store.local_path("runs")) is None:
        return None
    return shutil.disk_usage(next(parent for parent in folder.parents if parent.is_dir())).free


def require_room(store: object_store.ObjectStore, room: StoreRoom) -> None:
    """Raise `InvalidConfiguration` if the store's disk cannot hold the checkpoints that retention keeps."""
    if room.free_bytes is not None and room.needed_bytes > room.free_bytes:
        raise InvalidConfiguration(
            f"store {store.url}: {format_quantity(room.needed_bytes)} are needed for checkpoints of "
            f"{format_quantity(room.bytes_each)}, {format_quantity(room.free_bytes)} are free; free space, lower "
            "checkpoint.keep_last, keep_best or raise keep_every, or choose another --store"
        )
