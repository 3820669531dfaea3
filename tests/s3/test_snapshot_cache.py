"""Snapshots in object storage, read through the cache by processes that know nothing of each other."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

from cairn.storage.errors import SnapshotDamaged
from cairn.storage.snapshots.data_snapshot import DOCUMENTS, TOKENIZER, open_snapshot, publish_snapshot
from cairn.storage.stores.codec import sha256
from cairn.storage.stores.s3_bucket import S3Bucket
from cairn.storage.stores.s3_store import S3Store
from tests.s3.servers import S3Server
from tests.storage.staged_snapshot import manifest_of, stage_snapshot

TOKENS = 200_000
SHARD_TOKENS = 20_000
TEXT = np.random.default_rng(0).integers(0, 60_000, TOKENS)
MANIFEST = manifest_of(train=TOKENS, val=20, vocab_size=60_000)
READS_ALL = """
import sys
from pathlib import Path
from cairn.storage.snapshots import data_snapshot
from cairn.storage.stores.open_store import open_store
data_snapshot.EAGER_BYTES, data_snapshot.CACHE_BYTES = 0, int(sys.argv[4])
opened = data_snapshot.open_snapshot(open_store(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
print(sum(int(shard.tokens().sum(dtype="int64")) for shard in opened.train))
"""


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


def test_a_snapshot_larger_than_the_cache_is_read_whole(
    store: S3Store, snapshot_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.storage.snapshots.data_snapshot.EAGER_BYTES", 0)
    monkeypatch.setattr("cairn.storage.snapshots.data_snapshot.CACHE_BYTES", 0)
    opened = open_snapshot(store, snapshot_id, tmp_path / "cache")
    assert np.concatenate(opened.train).tolist() == TEXT.tolist()


def test_processes_that_share_a_cache_too_small_for_them_read_every_token(
    store: S3Store, server: S3Server, snapshot_id: str, tmp_path: Path
) -> None:
    environment = os.environ | server.environment()
    command = [sys.executable, "-c", READS_ALL, store.url, snapshot_id, str(tmp_path / "cache"), "50000"]
    readers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sums = [int(reader.communicate(timeout=240)[0]) for reader in readers]
    assert sums == [int(TEXT.sum())] * 2


@pytest.mark.parametrize("name", [TOKENIZER, DOCUMENTS, "train-00003.arrow", "val-00000.arrow"])
def test_a_flipped_byte_of_a_copy_is_found_at_the_next_start_and_fetched_again(
    store: S3Store, snapshot_id: str, tmp_path: Path, name: str
) -> None:
    opened = open_snapshot(store, snapshot_id, tmp_path / "cache")
    digest = next(item.sha256 for item in opened.manifest.objects if item.key == name)
    del opened
    copy = tmp_path / "cache" / digest
    data = bytearray(copy.read_bytes())
    data[len(data) // 2] ^= 1
    copy.write_bytes(data)
    assert open_snapshot(store, snapshot_id, tmp_path / "cache").train
    assert sha256(copy.read_bytes()) == digest


@pytest.mark.parametrize("eager_bytes", [0, 1 << 30])
def test_a_flipped_byte_in_the_bucket_names_the_shard_and_leaves_no_copy(
    store: S3Store, snapshot_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager_bytes: int
) -> None:
    monkeypatch.setattr("cairn.storage.snapshots.data_snapshot.EAGER_BYTES", eager_bytes)
    key = f"data/{snapshot_id}/train-00004.arrow"
    data = bytearray(store.read(key))
    data[-700] ^= 1
    store.write(key, bytes(data))
    with pytest.raises(SnapshotDamaged, match=f"{key}: sha256 is"):
        open_snapshot(store, snapshot_id, tmp_path / "cache").train[4][:1]
    assert sha256(bytes(data)) not in [path.name for path in (tmp_path / "cache").iterdir()]
