import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest

from cairn.storage.errors import IntegrityError, ObjectMissing
from cairn.storage.snapshots.data_snapshot import DOCUMENTS, open_snapshot, publish_snapshot, read_manifest
from cairn.storage.snapshots.snapshot_manifest import (
    DocumentRow,
    SnapshotGroup,
    SnapshotManifest,
    SnapshotObject,
)
from cairn.storage.stores.codec import decode, encode, sha256
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from tests.memory_store import MemoryStore
from tests.storage.builders import flip_bit
from tests.storage.staged_snapshot import ROW, manifest_of, stage_snapshot

MANIFEST = manifest_of(train=100, val=10)


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    return stage_snapshot(tmp_path / "staged", MANIFEST)


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "store")


@pytest.fixture
def snapshot_id(store: ObjectStore, staged: Path) -> str:
    """The snapshot, published."""
    return publish_snapshot(store, staged, MANIFEST)[0]


class _StoreOfPairs(MemoryStore):
    """Goes on with the first objects written as streams once two are under way."""

    def __init__(self) -> None:
        super().__init__()
        self._pair, self._first = threading.Barrier(2), iter((True, True))
        self.order = list[str]()

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        if next(self._first, False):
            self._pair.wait(timeout=60)
        self.order.append(key)
        return super().write_stream(key, chunks)

    def write(self, key: str, data: bytes) -> None:
        self.order += [key] * key.endswith("snapshot.json")
        super().write(key, data)


def test_files_are_uploaded_at_once_and_the_manifest_after_all_of_them(staged: Path) -> None:
    store = _StoreOfPairs()
    snapshot_id, _ = publish_snapshot(store, staged, MANIFEST)
    assert store.order[-1] == f"data/{snapshot_id}/snapshot.json" and len(store.order) == 6


def names_of(store: ObjectStore, snapshot_id: str) -> list[str]:
    return [key.rpartition("/")[2] for key in store.keys(f"data/{snapshot_id}")]


def test_a_published_snapshot_opens_with_the_tokens_it_was_given(
    store: ObjectStore, snapshot_id: str, tmp_path: Path
) -> None:
    opened = open_snapshot(store, snapshot_id, tmp_path / "cache")
    assert np.concatenate(opened.train).tolist() == list(range(100))
    assert np.concatenate(opened.val).tolist() == list(range(10))
    assert opened.tokenizer_json == "{}"


def test_the_layout_is_the_promised_one(store: ObjectStore, snapshot_id: str) -> None:
    shards = ["train-00000.arrow", "train-00001.arrow", "val-00000.arrow"]
    assert names_of(store, snapshot_id) == ["documents.parquet", "snapshot.json", "tokenizer.json", *shards]


def test_the_id_is_the_hash_of_the_manifest(store: ObjectStore, staged: Path) -> None:
    snapshot_id, manifest = publish_snapshot(store, staged, MANIFEST)
    assert sha256(store.read(f"data/{snapshot_id}/snapshot.json")) == snapshot_id
    assert read_manifest(store, snapshot_id) == manifest


def test_publishing_twice_changes_nothing(store: ObjectStore, staged: Path) -> None:
    first = publish_snapshot(store, staged, MANIFEST)
    before = {key: store.read(key) for key in store.keys("data")}
    assert publish_snapshot(store, staged, MANIFEST) == first
    assert {key: store.read(key) for key in store.keys("data")} == before


def test_a_snapshot_without_its_marker_is_invisible(store: ObjectStore, snapshot_id: str, tmp_path: Path) -> None:
    store.delete(f"data/{snapshot_id}/snapshot.json")
    with pytest.raises(ObjectMissing, match="no such data snapshot"):
        open_snapshot(store, snapshot_id, tmp_path / "cache")


@pytest.mark.parametrize("name", ["tokenizer.json", "train-00000.arrow"])
def test_a_missing_object_is_refused_by_name(store: ObjectStore, snapshot_id: str, tmp_path: Path, name: str) -> None:
    store.delete(f"data/{snapshot_id}/{name}")
    with pytest.raises(IntegrityError, match=f"data/{snapshot_id}/{name}: "):
        open_snapshot(store, snapshot_id, tmp_path / "cache")


def test_a_damaged_marker_is_not_mistaken_for_a_published_snapshot(
    store: ObjectStore, staged: Path, snapshot_id: str
) -> None:
    flip_bit(store, f"data/{snapshot_id}/snapshot.json")
    with pytest.raises(IntegrityError, match=f"delete data/{snapshot_id} and run again"):
        publish_snapshot(store, staged, MANIFEST)


def test_a_remote_snapshot_is_read_once_and_then_from_the_cache(staged: Path, tmp_path: Path) -> None:
    store = MemoryStore()
    snapshot_id, manifest = publish_snapshot(store, staged, MANIFEST)
    open_snapshot(store, snapshot_id, tmp_path / "cache")
    for item in manifest.objects:
        store.delete(f"data/{snapshot_id}/{item.key}")
    assert open_snapshot(store, snapshot_id, tmp_path / "cache").train


def test_a_local_snapshot_is_mapped_where_it_lies(staged: Path, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    snapshot_id, _ = publish_snapshot(store, staged, MANIFEST)
    open_snapshot(store, snapshot_id, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_shards_that_hold_fewer_tokens_than_promised_are_refused(
    store: ObjectStore, staged: Path, tmp_path: Path
) -> None:
    (staged / "train-00001.arrow").unlink()
    snapshot_id, _ = publish_snapshot(store, staged, MANIFEST)
    with pytest.raises(IntegrityError, match="train shards hold 64 tokens, the manifest says 100"):
        open_snapshot(store, snapshot_id, tmp_path / "cache")


def test_a_manifest_of_a_later_version_is_refused() -> None:
    store = MemoryStore()
    data = encode(MANIFEST).replace(b'"version": 1', b'"version": 2')
    store.write(f"data/{sha256(data)}/snapshot.json", data)
    with pytest.raises(IntegrityError, match="version = 2: only 1 is read; update cairn"):
        read_manifest(store, sha256(data))


@pytest.mark.parametrize("key", ["../escape", "", ".hidden", "a/b"])
def test_an_object_outside_the_snapshots_folder_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="must be a plain file name"):
        SnapshotObject(key=key, bytes=1, sha256="ab" * 32)


def test_bytes_per_token_counts_the_text_of_its_own_split() -> None:
    assert (MANIFEST.bytes_per_token("train"), MANIFEST.bytes_per_token("val")) == (4.0, 2.5)


def test_the_document_index_keeps_every_field(staged: Path) -> None:
    (row,) = parquet.read_table(staged / DOCUMENTS).to_pylist()
    assert DocumentRow(**row) == ROW


def test_groups_are_written_only_where_there_are_some() -> None:
    groups = (SnapshotGroup(name="a.txt", sources=1, train_tokens=100, val_tokens=10),)
    plain, grouped = encode(MANIFEST), encode(replace(MANIFEST, groups=groups))
    assert b"groups" not in plain and decode(plain, SnapshotManifest, where="here").known_groups == ()
    assert decode(grouped, SnapshotManifest, where="here").known_groups == groups


@pytest.mark.parametrize(("train", "val"), [(99, 10), (100, 11)])
def test_groups_that_are_not_the_whole_snapshot_are_refused(train: int, val: int) -> None:
    groups = (SnapshotGroup(name="a.txt", sources=1, train_tokens=train, val_tokens=val),)
    with pytest.raises(ValueError, match="must be all of its"):
        replace(MANIFEST, groups=groups)
