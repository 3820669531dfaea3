"""Bytes that rot: one bit of a checkpoint or of the data is another one when the next attempt reads it."""

import random
import signal
from pathlib import Path

from tests.programs.chaos.environment import Environment
from tests.programs.chaos.plan import Skipped
from tests.programs.chaos.processes import WORKERS

_SHARD_BYTES = 100_000


def flip_checkpoint(environment: Environment) -> int:
    """Flip a bit of the newest checkpoint while everybody stands still, and kill them; returns how many."""
    environment.processes.send_signal(signal.SIGSTOP, *WORKERS)
    state = environment.observer.state()
    if len(state.readable) < 2 or state.open_attempt is None:
        environment.processes.send_signal(signal.SIGCONT, *WORKERS)
        raise Skipped("fewer than two checkpoints can be read")
    shards = [key for key in environment.observer.store.keys(state.readable[0].committed.prefix) if "weights" in key]
    data = environment.observer.store.read(shards[0])
    environment.observer.store.write(shards[0], flipped(data, environment.tag))
    return environment.kill(*WORKERS)


def flip_data(environment: Environment) -> int:
    """Flip a bit of a stored or a cached shard of data, and kill everybody; returns how many."""
    environment.processes.send_signal(signal.SIGSTOP, *WORKERS)
    chance, store = random.Random(environment.tag), environment.observer.store
    stored = [key for key in store.keys("data") if (store.size(key) or 0) > _SHARD_BYTES]
    cached = [path for path in sorted((environment.folder / "cache" / "snapshots").rglob("*")) if _is_shard(path)]
    chosen = chance.choice([*stored, *cached])
    if isinstance(chosen, Path):
        chosen.write_bytes(flipped(chosen.read_bytes(), environment.tag))
    else:
        environment.rotten[chosen] = store.read(chosen)
        store.write(chosen, flipped(store.read(chosen), environment.tag))
    return environment.kill(*WORKERS)


def _is_shard(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and path.stat().st_size > _SHARD_BYTES


def flipped(data: bytes, seed: str) -> bytes:
    """Return the bytes with one bit another."""
    chance, changed = random.Random(seed), bytearray(data)
    changed[chance.randrange(len(data) // 2, len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)
