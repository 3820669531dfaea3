"""Parts of a text in the store: swept when nobody takes them, and never trusted."""

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest

from cairn.storage.errors import IntegrityError
from cairn.storage.snapshots import data_snapshot
from cairn.storage.snapshots.token_shard import read_batches
from cairn.storage.stores.local_store import LocalStore

IDS = ("a" * 64, "b" * 64)
SCHEMA = pa.schema([("number", pa.int64())])
DAYS = 86_400


def written(path: Path, compression: str | None = None) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA, options=options) as writer:
        for first in (0, 1000):
            writer.write_batch(pa.record_batch([pa.array(range(first, first + 1000))], schema=SCHEMA))
    return path


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    found = LocalStore(tmp_path / "store")
    for parts_id in IDS:
        data_snapshot.publish_parts(found, parts_id, [written(tmp_path / "part")])
    return found


def age(store: LocalStore, parts_id: str, days: float) -> None:
    for key in store.keys(f"data/parts/{parts_id}"):
        status = os.stat(path := store.local_path(key))
        os.utime(path, (status.st_mtime - days * DAYS,) * 2)


def test_parts_come_back_as_they_were(store: LocalStore) -> None:
    parts = data_snapshot.find_parts(store, IDS[0])
    assert parts is not None
    batches = read_batches(store.local_path(parts[0].key), SCHEMA, where="here")
    assert [number for batch in batches for number in batch.column(0).to_pylist()] == list(range(2000))


def test_compressed_parts_are_refused_before_they_are_decompressed(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"here: .* its record batch is compressed"):
        next(read_batches(written(tmp_path / "part", "zstd"), SCHEMA, where="here"))


def test_parts_of_other_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"columns are \[number int64\], expected \[other int64\]"):
        next(read_batches(written(tmp_path / "part"), pa.schema([("other", pa.int64())]), where="here"))


def test_a_part_that_points_outside_of_itself_is_refused(tmp_path: Path) -> None:
    schema, path = pa.schema([("texts", pa.string())]), tmp_path / "part"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array(["x" * 0x1234])], schema=schema))
    before, found, after = path.read_bytes().rpartition(b"\x34\x12\0\0")  # where the text ends
    path.write_bytes(before + found.replace(b"\0\0", b"\0\x10") + after)
    with pytest.raises(IntegrityError, match="here: not a readable Arrow file"):
        next(read_batches(path, schema, where="here"))


@pytest.mark.parametrize("content", [b"{", b'[{"key": "../../x", "bytes": 1, "sha256": "0"}]'])
def test_a_list_that_cannot_be_read_is_none(store: LocalStore, content: bytes) -> None:
    store.write(f"data/parts/{IDS[0]}/parts.json", content)
    assert data_snapshot.find_parts(store, IDS[0]) is None
    assert not data_snapshot.has_parts(store, IDS[0])


def test_a_sweep_deletes_parts_after_two_weeks(store: LocalStore) -> None:
    age(store, IDS[0], 15)
    age(store, IDS[1], 13)
    data_snapshot.sweep_parts(store)
    assert store.keys(f"data/parts/{IDS[0]}") == []
    assert data_snapshot.has_parts(store, IDS[1])


def test_a_store_without_parts_has_nothing_to_sweep(tmp_path: Path) -> None:
    data_snapshot.sweep_parts(LocalStore(tmp_path / "empty"))


@pytest.mark.parametrize(("days", "left"), [(13, 1), (15, 0)])
def test_a_sweep_discards_what_a_killed_upload_left_two_weeks_ago(store: LocalStore, days: float, left: int) -> None:
    path = store.local_path(store.keys(f"data/parts/{IDS[0]}")[0])
    assert path is not None
    killed = Path(path).with_name(f".{Path(path).name}.{'0' * 8}")
    killed.write_bytes(b"half")
    os.utime(killed, (time.time() - days * DAYS,) * 2)
    data_snapshot.sweep_parts(store)
    assert len(store.unfinished("data")) == left
