"""Large snapshots: shards verified before they are asked for."""

import threading
from pathlib import Path

import numpy as np
import pytest

from cairn.storage.errors import SnapshotDamaged
from cairn.storage.snapshots.token_shard import ShardSchema, VerifiedShard, prefetch_shards, write_shard

SCHEMA = ShardSchema(tokenizer_sha256="ab" * 32, vocab_size=1000)
PATIENCE_SECONDS = 240


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_shard(tmp_path / "shard", np.arange(50, dtype=np.uint16), SCHEMA)
    return tmp_path / "shard"


def test_shards_are_fetched_several_at_a_time_before_anybody_asks(path: Path) -> None:
    together = threading.Barrier(5)

    def fetch() -> Path:
        together.wait(PATIENCE_SECONDS)
        return path

    prefetch_shards([VerifiedShard(fetch, SCHEMA, tokens=50, where="s") for _ in range(4)], threads=4)
    together.wait(PATIENCE_SECONDS)


def test_a_shard_that_is_asked_for_meanwhile_is_fetched_once(path: Path) -> None:
    asked, calls = threading.Event(), []

    def fetch() -> Path:
        calls.append(1)
        asked.set()
        return path

    shard = VerifiedShard(fetch, SCHEMA, tokens=50, where="s")
    prefetch_shards([shard], threads=4)
    assert asked.wait(PATIENCE_SECONDS)
    assert (shard[3], len(calls)) == (3, 1)


def test_a_damaged_shard_is_found_by_who_uses_it_and_stops_no_other(path: Path) -> None:
    other = threading.Event()

    def damaged() -> Path:
        raise SnapshotDamaged("my/shard: damaged")

    def sound() -> Path:
        other.set()
        return path

    shards = [VerifiedShard(fetch, SCHEMA, tokens=50, where="s") for fetch in (damaged, sound)]
    prefetch_shards(shards, threads=1)
    assert other.wait(PATIENCE_SECONDS)
    with pytest.raises(SnapshotDamaged, match="my/shard"):
        shards[0].tokens()
