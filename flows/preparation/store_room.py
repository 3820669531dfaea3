"""Whether the checkpoints that retention keeps fit into the store, and how much they need where nobody can tell."""

import shutil
from dataclasses import dataclass

from model.estimates.size_estimate import checkpoint_bytes
from storage.logs.run_state import RunState
from storage.stores.object_store import ObjectStore
from tasks.configuration.run_configuration import RunConfig
from tasks.errors import InvalidConfiguration

_BESIDE_KEPT = 2
"""One checkpoint on its way, and one that is superseded and not yet deleted."""


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
    rules, total = config.checkpoint, config.training.steps
    milestones = total // rules.keep_every if rules.keep_every else 0
    commits = -(-total // rules.every_steps)
    kept = min(commits, rules.keep_last + rules.keep_best + milestones)
    each = checkpoint_bytes(config.model, config.training, vocab_size)
    there = sum(record.committed.bytes for record in state.live_checkpoints)
    most = each * (kept + _BESIDE_KEPT if rules.every_seconds else min(commits, kept + _BESIDE_KEPT))
    return StoreRoom(
        bytes_each=each, kept_at_most=kept, needed_bytes=max(0, most - there), free_bytes=_free_bytes(store)
    )


def require_room(store: ObjectStore, room: StoreRoom) -> None:
    """Raise `InvalidConfiguration` if the store's disk cannot hold what retention keeps."""
    if room.free_bytes is not None and room.needed_bytes > room.free_bytes:
        raise InvalidConfiguration(
            f"store {store.url}: {room.needed_bytes / 1e9:.3g} GB are needed for checkpoints of "
            f"{room.bytes_each / 1e9:.3g} GB, {room.free_bytes / 1e9:.3g} GB are free; free space, lower "
            "checkpoint.keep_last, keep_best or raise keep_every, or choose another --store"
        )


def _free_bytes(store: ObjectStore) -> int | None:
    folder = store.local_path("runs")
    if folder is None:
        return None
    return shutil.disk_usage(next(parent for parent in folder.parents if parent.is_dir())).free
