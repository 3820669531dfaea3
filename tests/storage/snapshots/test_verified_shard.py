"""Shards of a large snapshot: verified before their first use, fetched before anybody asks."""

import threading
from pathlib import Path

import numpy as np
import pytest

from cairn.storage.errors import IntegrityError, SnapshotDamaged
from cairn.storage.snapshots.token_shard import ShardSchema, VerifiedShard, prefetch_shards, write_shard

SCHEMA = ShardSchema(tokenizer_sha256="ab" * 32, vocab_size=1000)
TOKENS = np.arange(500, dtype=np.uint16)
PATIENCE_SECONDS = 240


class Fetch:
    """Counts how often a shard is asked for; refuses for as long as it is told to."""

    def __init__(self, path: Path) -> None:
        self.path, self.calls, self.damaged = path, 0, False

    def __call__(self) -> Path:
        self.calls += 1
        if self.damaged:
            raise SnapshotDamaged("my/shard: damaged")
        return self.path


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    write_shard(tmp_path / "shard", TOKENS, SCHEMA)
    return Fetch(tmp_path / "shard")


@pytest.fixture
def shard(fetch: Fetch) -> VerifiedShard:
    return VerifiedShard(fetch, SCHEMA, tokens=500, where="my/shard")


def test_the_length_is_known_without_the_file(shard: VerifiedShard, fetch: Fetch) -> None:
    assert (len(shard), fetch.calls) == (500, 0)


def test_the_first_token_verifies_the_shard_and_the_next_ones_do_not(shard: VerifiedShard, fetch: Fetch) -> None:
    assert shard[7:9].tolist() == [7, 8] and shard[499] == 499
    assert fetch.calls == 1


def test_it_converts_as_a_row_of_numbers_does(shard: VerifiedShard) -> None:
    assert np.array_equal(np.concatenate([shard, shard]), np.concatenate([TOKENS, TOKENS]))


def test_its_copy_is_somebody_elses_to_change(shard: VerifiedShard) -> None:
    np.array(shard)[0] = 7
    assert shard[0] == 0


def test_its_tokens_cannot_be_written(shard: VerifiedShard) -> None:
    with pytest.raises(ValueError, match="read-only"):
        shard[:2][0] = 1


def test_a_damaged_shard_is_refused_at_every_use(shard: VerifiedShard, fetch: Fetch) -> None:
    fetch.damaged = True
    for _ in range(2):
        with pytest.raises(SnapshotDamaged, match="my/shard"):
            shard[:1]


def test_a_shard_of_another_length_than_promised_is_refused(fetch: Fetch) -> None:
    with pytest.raises(IntegrityError, match="my/shard: holds 500 tokens, its manifest says 499"):
        VerifiedShard(fetch, SCHEMA, tokens=499, where="my/shard").tokens()


def test_threads_that_ask_at_once_verify_it_once(shard: VerifiedShard, fetch: Fetch) -> None:
    together = threading.Barrier(8)

    def ask() -> None:
        together.wait()
        shard[:1]

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetch.calls == 1


def test_shards_are_fetched_several_at_a_time_before_anybody_asks(fetch: Fetch) -> None:
    together = threading.Barrier(5)

    def take() -> Path:
        together.wait(PATIENCE_SECONDS)
        return fetch.path

    prefetch_shards([VerifiedShard(take, SCHEMA, tokens=500, where="s") for _ in range(4)], threads=4)
    together.wait(PATIENCE_SECONDS)


def test_a_shard_that_is_asked_for_meanwhile_is_fetched_once(fetch: Fetch) -> None:
    asked, calls = threading.Event(), []

    def take() -> Path:
        calls.append(1)
        asked.set()
        return fetch.path

    shard = VerifiedShard(take, SCHEMA, tokens=500, where="s")
    prefetch_shards([shard], threads=4)
    assert asked.wait(PATIENCE_SECONDS)
    assert (shard[3], len(calls)) == (3, 1)


def test_a_damaged_shard_is_found_by_who_uses_it_and_stops_no_other(fetch: Fetch) -> None:
    other = threading.Event()

    def damaged() -> Path:
        raise SnapshotDamaged("my/shard: damaged")

    def sound() -> Path:
        other.set()
        return fetch.path

    shards = [VerifiedShard(take, SCHEMA, tokens=500, where="s") for take in (damaged, sound)]
    prefetch_shards(shards, threads=1)
    assert other.wait(PATIENCE_SECONDS)
    with pytest.raises(SnapshotDamaged, match="my/shard"):
        shards[0].tokens()
