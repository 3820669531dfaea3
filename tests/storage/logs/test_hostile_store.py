"""A store somebody else can write to: what lies there under a foreign name, or is larger than anything of ours."""

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cairn.storage.checkpoints.checkpoint import load_checkpoint, read_manifest
from cairn.storage.checkpoints.checkpoint_shard import ReadPolicy
from cairn.storage.checkpoints.payload import MANIFEST_VERSION
from cairn.storage.checkpoints.resume_point import Finding
from cairn.storage.checkpoints.sweep import SweepPlan, sweep
from cairn.storage.errors import IntegrityError, StorageError
from cairn.storage.logs.log_entry import CheckpointReference, EntryLog, entry_name
from cairn.storage.logs.registry import list_aliases
from cairn.storage.logs.run_entries import RUN_KINDS, CheckpointSuperseded
from cairn.storage.logs.run_index import list_run_ids
from cairn.storage.logs.run_state import AttemptRecord, RunState
from cairn.storage.logs.step_log import heartbeat_key, read_heartbeat, read_step_records, records_of
from cairn.storage.stores.codec import encode, sha256
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import MAX_READ_BYTES, ObjectStore, check_key
from tests.entries import NOON, started, writer
from tests.memory_store import MemoryStore
from tests.storage.builders import (
    LOG,
    commit,
    committed,
    forge,
    newest_entry,
    open_run,
    run_log,
    run_with_commits,
    stage,
)

FOREIGN = ["a b", "a\\b", "-rf", "a\nb", "\x1b[31m", "ünïcode", "x" * 201, "~"]


def filled_with_zeros(root: Path, key: str, size_bytes: int) -> None:
    """Put a sparse file of that size under the key."""
    (root / key).parent.mkdir(parents=True, exist_ok=True)
    with (root / key).open("wb") as file:
        file.truncate(size_bytes)


def test_no_more_is_read_than_the_reader_takes(store: ObjectStore) -> None:
    store.write("a/b", bytes(1000))
    assert len(store.read("a/b", at_most_bytes=1000)) == 1000
    with pytest.raises(IntegrityError, match="more than the 999 bytes"):
        store.read("a/b", at_most_bytes=999)


@pytest.mark.unsound_log
@pytest.mark.parametrize("size_bytes", [MAX_READ_BYTES + 1, 2**40])
def test_an_entry_of_any_size_is_refused_in_bounded_memory(tmp_path: Path, size_bytes: int) -> None:
    filled_with_zeros(tmp_path, f"{LOG}/{entry_name(0)}", size_bytes)
    with pytest.raises(IntegrityError, match="more than the 67,108,864 bytes that are read"):
        newest_entry(EntryLog(store=LocalStore(tmp_path), prefix=LOG, kinds=RUN_KINDS))


def test_a_heartbeat_and_a_fold_of_any_size_are_none(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    log = open_run(store)
    filled_with_zeros(tmp_path, heartbeat_key(log.prefix, 1), 2**40)
    filled_with_zeros(tmp_path, log.fold_key, 2**40)
    assert read_heartbeat(store, log.prefix, 1) is None
    assert open_run(LocalStore(tmp_path)).refresh().opened is not None


def test_a_manifest_cannot_make_memory_out_of_a_number(tmp_path: Path) -> None:
    store, prefix = LocalStore(tmp_path), "runs/r1/checkpoints/step-00000001-attempt-0001"
    tensor = {"name": "w", "dtype": "U8", "shape": [2**62], "chunks": ""}
    huge = {"name": "weights", "bytes": 2**62 + 8, "sha256": "", "header_bytes": 8, "tensors": [tensor]}
    trainer = {"name": "trainer.json", "bytes": 2**62, "sha256": ""}
    manifest = {"version": MANIFEST_VERSION, "run_id": "r1", "attempt": 1, "step": 1, "state_sha256": "s"}
    for shards, problem in ([huge], "0 bytes of digests, its size needs"), ([], f"0 bytes, must be {2**62} bytes"):
        data = encode({**manifest, "trainer": trainer, "shards": shards})
        store.write(f"{prefix}/manifest.json", data)
        reference = CheckpointReference(step=1, attempt=1, prefix=prefix, manifest_sha256=sha256(data))
        with pytest.raises(IntegrityError, match=problem):
            load_checkpoint(store, reference, read_policy=ReadPolicy(tries=1))


@pytest.mark.parametrize("prefix", ["../elsewhere", "/etc", "runs/../../etc", "runs//r1", "runs/r1\0", ""])
def test_a_reference_out_of_the_store_is_followed_nowhere(store: ObjectStore, prefix: str) -> None:
    with pytest.raises(StorageError, match="each part between"):
        read_manifest(store, CheckpointReference(step=1, attempt=1, prefix=prefix, manifest_sha256="0" * 64))


@pytest.mark.parametrize(
    "key", ["x" * 201, f"a/{'x' * 201}/b", "/".join(["abcdefgh"] * 100)], ids=["name", "inner", "whole"]
)
def test_a_name_no_store_could_keep_is_refused_before_it_is_tried(store: ObjectStore, key: str) -> None:
    with pytest.raises(StorageError, match="at most") as refused:
        store.write(key, b"")
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("key", ["x" * 200, "/".join(["abcdefg"] * 100)], ids=["name", "whole"])
def test_the_longest_names_are_kept_everywhere(store: ObjectStore, key: str) -> None:
    assert (store.create(key, b"1"), store.read(key)) == (True, b"1")


@pytest.mark.parametrize("name", FOREIGN, ids=lambda name: repr(name[:8]))
def test_what_has_no_key_for_a_name_is_nobodys_object(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path)
    run_with_commits(store, 5)
    before = _listed(store)
    for folder in ("runs", "models", LOG, "runs/r1/checkpoints"):
        made = tmp_path / folder / os.fsdecode(name.encode())  # UTF-8 in every locale
        made.mkdir(parents=True)
        (made / "file").write_bytes(b"")
    assert (_listed(store), before[1]) == (before, ["runs/r1"])
    assert all(check_key(key) for key in store.keys("runs"))


def _listed(store: LocalStore) -> list[list[str]]:
    return [store.keys("runs"), store.folders("runs"), list_run_ids(store), list_aliases(store)]


@pytest.mark.unsound_log
def test_a_file_with_a_foreign_name_is_not_the_newest_entry(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    open_run(store)
    (tmp_path / LOG / "0 notes.json").write_bytes(b"")
    assert store.first(LOG) == f"{LOG}/{entry_name(0)}"


@pytest.mark.parametrize(
    "line",
    [
        b'{"x":' + b"[" * 100_000,
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xff\xfe",
        b'{"step":1e999}',
        b"null",
        b"x" * 1_000_000,
    ],
    ids=["deep", "deep-and-closed", "not-utf-8", "huge-number", "null", "long"],
)
def test_a_hostile_step_record_is_left_out(line: bytes) -> None:
    assert records_of(1, line + b"\n" + line) == []


def test_step_records_of_any_size_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    filled_with_zeros(tmp_path, "runs/r1/steps/attempt-0001.jsonl", 2**42)
    read: list[int] = []

    class Counting(LocalStore):
        def read(self, key: str, *, at_most_bytes: int = 0) -> bytes:
            read.append(at_most_bytes)
            return super().read(key, at_most_bytes=min(at_most_bytes, 10**7))

    attempt = AttemptRecord(started=started(1), started_at=NOON)
    with pytest.raises(IntegrityError, match="bytes that are read"):
        read_step_records(Counting(tmp_path), "runs/r1", [attempt])
    assert 0 < read[0] <= 2**31


@pytest.mark.unsound_log
@pytest.mark.parametrize(
    "prefix",
    [
        "runs",
        "runs/r1",
        "runs/r1/log",
        "runs/r1/checkpoints",
        "runs/other/checkpoints/step-00000005-attempt-0001",
        "runs/r1/checkpoints/step-00000005-attempt-0001/deeper",
        "runs/r1/checkpoints/notes",
        "models/champion",
    ],
)
@pytest.mark.parametrize("is_superseded", [True, False], ids=["superseded", "committed"])
def test_a_sweep_deletes_nothing_but_checkpoints_of_its_own_run(prefix: str, is_superseded: bool) -> None:
    store = MemoryStore()
    log = run_with_commits(store, 5, 10)
    for key in (
        "runs/other/checkpoints/step-00000005-attempt-0001/manifest.json",
        "models/champion/log/9999999999.json",
    ):
        store.write(key, b"{}")
    hostile = replace(committed(7, 1), prefix=prefix)
    forge(store, hostile, attempt=1)
    commit(log, stage(store, step=20, attempt=1))
    if is_superseded:
        forge(store, CheckpointSuperseded(why="hostile", **asdict(hostile.reference)))
    before = {key for key in store.keys("runs") if "/log/" not in key} | set(store.keys("models"))
    with pytest.raises(IntegrityError, match="is not a checkpoint folder of run r1"):
        sweep(run_log(store), give_up_all, writer=writer())
    assert before <= {*store.keys("runs"), *store.keys("models")}


def give_up_all(state: RunState, folders: object) -> SweepPlan:
    """The plan of who wants everything gone."""
    findings = tuple(
        Finding(key=record.committed.prefix, is_over=record.committed.step == 7, why="away")
        for record in state.checkpoints
        if record.state in ("committed", "quarantined")
    )
    return SweepPlan(pins=(), checkpoints=findings, staged=())
