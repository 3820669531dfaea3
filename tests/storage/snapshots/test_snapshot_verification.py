"""No byte of a snapshot is used before it was hashed, however large the snapshot and wherever it lies."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cairn.model.data.token_windows import TokenWindows
from cairn.storage.errors import IntegrityError, SnapshotDamaged
from cairn.storage.snapshots.data_snapshot import (
    DOCUMENTS,
    TOKENIZER,
    OpenSnapshot,
    SnapshotFiles,
    open_snapshot,
    publish_snapshot,
)
from cairn.storage.stores.codec import sha256
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from tests.memory_store import MemoryStore
from tests.storage.staged_snapshot import manifest_of, stage_snapshot

BLOCK = 8
SHARDS = ("train-00000.arrow", "train-00001.arrow", "val-00000.arrow")
MANIFEST = manifest_of(train=100, val=20)


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "store")


@pytest.fixture
def snapshot_id(store: ObjectStore, tmp_path: Path) -> str:
    return publish_snapshot(store, stage_snapshot(tmp_path / "staged", MANIFEST), MANIFEST)[0]


def flipped(store: ObjectStore, key: str) -> Iterator[int]:
    """Flip bytes all over the object, each alone; fewer on a disk, which takes its time."""
    sound = store.read(key)
    every = 7 if isinstance(store, MemoryStore) else 41
    for position in range(0, len(sound), every):
        data = bytearray(sound)
        data[position] ^= 0x80
        store.write(key, bytes(data))
        yield position
    store.write(key, sound)


def open_lazily(store: ObjectStore, snapshot_id: str, tmp_path: Path) -> OpenSnapshot:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.storage.snapshots.data_snapshot.EAGER_BYTES", 0)
        return open_snapshot(store, snapshot_id, tmp_path / "cache")


def windows_of(opened: OpenSnapshot, name: str) -> TokenWindows:
    return TokenWindows(opened.train if name.startswith("train") else opened.val, BLOCK, 300)


@pytest.mark.parametrize("name", SHARDS)
def test_any_flipped_byte_of_a_large_snapshots_shard_is_found_before_a_window_of_it_is_used(
    store: ObjectStore, snapshot_id: str, tmp_path: Path, name: str
) -> None:
    window = np.array([8 if name == "train-00001.arrow" else 0])
    for _ in flipped(store, f"data/{snapshot_id}/{name}"):
        windows = windows_of(open_lazily(store, snapshot_id, tmp_path), name)
        with pytest.raises(SnapshotDamaged, match=f"data/{snapshot_id}/{name}: sha256 is .*; delete"):
            windows.gather(window)


@pytest.mark.parametrize("name", [TOKENIZER, DOCUMENTS, *SHARDS])
def test_any_flipped_byte_of_a_small_snapshot_is_found_when_it_is_opened(
    store: ObjectStore, snapshot_id: str, tmp_path: Path, name: str
) -> None:
    for _ in flipped(store, f"data/{snapshot_id}/{name}"):
        with pytest.raises(SnapshotDamaged, match=f"data/{snapshot_id}/{name}: sha256 is .*; delete"):
            open_snapshot(store, snapshot_id, tmp_path / "cache")


@pytest.mark.parametrize("name", [TOKENIZER, DOCUMENTS])
def test_any_flipped_byte_of_another_object_is_found_before_it_is_read(
    store: ObjectStore, snapshot_id: str, tmp_path: Path, name: str
) -> None:
    for _ in flipped(store, f"data/{snapshot_id}/{name}"):
        files = SnapshotFiles(store, snapshot_id, tmp_path / "cache")
        with pytest.raises(SnapshotDamaged, match=f"data/{snapshot_id}/{name}: "):
            files.path(name)


def test_any_flipped_byte_of_the_manifest_is_found(store: ObjectStore, snapshot_id: str, tmp_path: Path) -> None:
    for _ in flipped(store, f"data/{snapshot_id}/snapshot.json"):
        with pytest.raises(IntegrityError, match=f"data/{snapshot_id}/snapshot.json: sha256 is"):
            open_lazily(store, snapshot_id, tmp_path)


def test_the_sound_shards_of_a_damaged_snapshot_can_be_trained_on(
    store: ObjectStore, snapshot_id: str, tmp_path: Path
) -> None:
    next(flipped(store, f"data/{snapshot_id}/train-00001.arrow"))
    windows = windows_of(open_lazily(store, snapshot_id, tmp_path), "train")
    assert windows.gather(np.array([2]))[0].tolist() == list(range(16, 25))


def test_a_window_that_reaches_into_a_damaged_shard_is_not_used(
    store: ObjectStore, snapshot_id: str, tmp_path: Path
) -> None:
    next(flipped(store, f"data/{snapshot_id}/train-00001.arrow"))
    windows = windows_of(open_lazily(store, snapshot_id, tmp_path), "train")
    with pytest.raises(SnapshotDamaged, match=r"train-00001\.arrow"):
        windows.gather(np.array([7]))


def test_a_large_snapshot_holds_the_same_tokens_as_a_small_one(
    store: ObjectStore, snapshot_id: str, tmp_path: Path
) -> None:
    lazy, eager = open_lazily(store, snapshot_id, tmp_path), open_snapshot(store, snapshot_id, tmp_path / "cache")
    assert np.array_equal(np.concatenate(lazy.train), np.concatenate(eager.train))
    assert np.array_equal(np.concatenate(lazy.val), np.concatenate(eager.val))


def test_opening_a_large_snapshot_fetches_no_shard(snapshot_id: str, store: ObjectStore, tmp_path: Path) -> None:
    opened = open_lazily(store, snapshot_id, tmp_path)
    for name in SHARDS:
        store.delete(f"data/{snapshot_id}/{name}")
    assert [len(shard) for shard in (*opened.train, *opened.val)] == [64, 36, 20]
    with pytest.raises(SnapshotDamaged, match=r"val-00000\.arrow: missing"):
        opened.val[0][:1]


def test_a_manifest_that_does_not_count_the_tokens_of_its_shards_is_refused(
    store: ObjectStore, snapshot_id: str, tmp_path: Path
) -> None:
    manifest = json.loads(store.read(f"data/{snapshot_id}/snapshot.json"))
    for item in manifest["objects"]:
        del item["tokens"]
    uncounted = json.dumps(manifest).encode()
    store.write(f"data/{sha256(uncounted)}/snapshot.json", uncounted)
    with pytest.raises(IntegrityError, match=r"train-00000\.arrow: the manifest does not say how many tokens it holds"):
        open_lazily(store, sha256(uncounted), tmp_path)
