"""Snapshots in object storage, read through the cache by processes that know nothing of each other.

What damage does is in test_data_snapshot.py and test_snapshot_verification.py, on stores without files.
"""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

from cairn.storage.snapshots.data_snapshot import open_snapshot, publish_snapshot
from cairn.storage.stores.s3_bucket import S3Bucket
from cairn.storage.stores.s3_store import S3Store
from tests.s3.servers import S3Server
from tests.storage.staged_snapshot import manifest_of, stage_snapshot

TOKENS = 200_000
SHARD_TOKENS = 20_000
TEXT = np.random.default_rng(0).integers(0, 60_000, TOKENS)
MANIFEST = manifest_of(train=TOKENS, val=20, vocab_size=60_000)
READ_ALL = """
import os, sys
from pathlib import Path
from cairn.storage.snapshots import data_snapshot
from cairn.storage.stores.open_store import open_store
data_snapshot.EAGER_BYTES, data_snapshot.CACHE_BYTES = 0, int(sys.argv[4])
os.fork()
opened = data_snapshot.open_snapshot(open_store(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
print(sum(int(shard.tokens().sum(dtype="int64")) for shard in opened.train))
"""
"""Two processes, so that both import what they need at once."""


@pytest.fixture
def store(direct_bucket: S3Bucket) -> S3Store:
    return S3Store(direct_bucket, uuid.uuid4().hex)


@pytest.fixture
def snapshot_id(store: S3Store, tmp_path: Path) -> str:
    staged = stage_snapshot(tmp_path / "staged", MANIFEST, text=TEXT, shard_tokens=SHARD_TOKENS, rows=())
    return publish_snapshot(store, staged, MANIFEST)[0]


def held_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("?" * 64))


def test_a_snapshot_in_object_storage_is_mapped_from_the_cache(
    store: S3Store, snapshot_id: str, tmp_path: Path
) -> None:
    opened = open_snapshot(store, snapshot_id, tmp_path / "cache")
    assert np.concatenate(opened.train).tolist() == TEXT.tolist()
    assert held_bytes(tmp_path / "cache") > 2 * TOKENS


def pass_hours(cache: Path) -> None:
    """Let the copies be two hours older."""
    for path in cache.glob("?" * 64):
        os.utime(path, times=(path.stat().st_mtime - 7200,) * 2)


def test_the_cache_keeps_its_bound_over_one_start_hours_after_the_other(
    store: S3Store, snapshot_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes = 5 * SHARD_TOKENS
    monkeypatch.setattr("cairn.storage.snapshots.data_snapshot.EAGER_BYTES", 0)
    monkeypatch.setattr("cairn.storage.snapshots.data_snapshot.CACHE_BYTES", limit_bytes)
    for shard in range(TOKENS // SHARD_TOKENS):
        opened = open_snapshot(store, snapshot_id, tmp_path / "cache")
        opened.train[shard][:1]
        del opened
        assert held_bytes(tmp_path / "cache") <= limit_bytes
        pass_hours(tmp_path / "cache")


def test_processes_that_share_a_cache_too_small_for_them_read_every_token(
    store: S3Store, server: S3Server, snapshot_id: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", READ_ALL, store.url, snapshot_id, str(tmp_path / "cache"), "50000"]
    environment = os.environ | server.environment()
    readers = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    assert readers.stdout.split() == [str(TEXT.sum())] * 2
