"""What the log says of a checkpoint, its manifest says too, and its tensors bear out; otherwise it is not used."""

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cairn.storage.checkpoints.checkpoint import load_checkpoint, open_checkpoint, verify_checkpoint
from cairn.storage.checkpoints.checkpoint_shard import ReadPolicy
from cairn.storage.checkpoints.payload import Manifest, ManifestObject, TrainerDocument, decode_manifest
from cairn.storage.checkpoints.resume_point import newest_verified
from cairn.storage.errors import IntegrityError, ObjectDamaged
from cairn.storage.logs.run_entries import CheckpointCommitted, StagedCheckpoint
from cairn.storage.stores.codec import decode, encode, sha256
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from tests.entries import writer
from tests.memory_store import MemoryStore
from tests.storage.builders import commit, fail_to_load, forge, no_sleep, run_log, run_with_commits, stage

ONE_READ = ReadPolicy(tries=1)
CHANGES: dict[str, Callable[[Manifest], Manifest]] = {
    "step": lambda manifest: replace(manifest, step=11),
    "attempt": lambda manifest: replace(manifest, attempt=2),
    "run": lambda manifest: replace(manifest, run_id="r2"),
    "state_sha256": lambda manifest: replace(manifest, state_sha256="0" * 64),
}


def restaged(store: ObjectStore, staged: StagedCheckpoint, change: Callable[[Manifest], Manifest]) -> StagedCheckpoint:
    """Put a changed manifest in the place of a staged one; the reference has its digest."""
    key = f"{staged.prefix}/manifest.json"
    data = encode(change(decode_manifest(store.read(key), where=key)))
    store.write(key, data)
    return replace(staged, manifest_sha256=sha256(data))


@pytest.fixture(params=CHANGES)
def fact(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def contradiction(fact: str) -> tuple[MemoryStore, StagedCheckpoint]:
    """A run with step 5 committed, and step 10 staged with a manifest that says something else of this fact."""
    store = MemoryStore()
    run_with_commits(store, 5)
    return store, restaged(store, stage(store, step=10, attempt=1), CHANGES[fact])


def test_verifying_names_what_the_manifest_says_otherwise(
    contradiction: tuple[MemoryStore, StagedCheckpoint], fact: str
) -> None:
    (damage,) = verify_checkpoint(*contradiction)
    assert damage.key.endswith("/manifest.json") and f"{fact} " in damage.found and "the log says" in damage.expected


def test_loading_refuses_what_verifying_refuses(contradiction: tuple[MemoryStore, StagedCheckpoint], fact: str) -> None:
    with pytest.raises(ObjectDamaged, match=fact):
        load_checkpoint(*contradiction, read_policy=ONE_READ)


def test_such_a_checkpoint_is_not_committed(contradiction: tuple[MemoryStore, StagedCheckpoint], fact: str) -> None:
    store, staged = contradiction
    with pytest.raises(IntegrityError, match=fact):
        commit(run_log(store), staged)


def test_a_start_falls_back_from_such_a_commit_without_waiting_for_an_attempt_to_fail(
    contradiction: tuple[MemoryStore, StagedCheckpoint],
) -> None:
    store, staged = contradiction
    forge(store, CheckpointCommitted(**asdict(staged), tokens=13, gpu_seconds=1.5), attempt=1)
    found = newest_verified(run_log(store), writer=writer(), sleep=no_sleep)
    assert found is not None and found.step == 5


STATES: dict[str, Callable[[ObjectStore, StagedCheckpoint], StagedCheckpoint]] = {
    "state_sha256": lambda store, staged: restaged(store, staged, CHANGES["state_sha256"]),
    "trainer's step": lambda store, staged: with_trainer_of(store, staged, step=11),
}
"""What manifest and log agree on, and the tensors or the trainer document contradict."""


def with_trainer_of(store: ObjectStore, staged: StagedCheckpoint, *, step: int) -> StagedCheckpoint:
    """Put the trainer document of another step in, under its right hash."""
    key = f"{staged.prefix}/trainer.json"
    document = encode(replace(decode(store.read(key), TrainerDocument, where=key), step=step))
    store.write(key, document)
    trainer = ManifestObject(name="trainer.json", bytes=len(document), sha256=sha256(document))
    return restaged(store, staged, lambda manifest: replace(manifest, trainer=trainer))


@pytest.fixture(params=STATES)
def untrue(request: pytest.FixtureRequest) -> tuple[MemoryStore, StagedCheckpoint]:
    store = MemoryStore()
    run_with_commits(store, 5)
    staged = STATES[request.param](store, stage(store, step=10, attempt=1))
    manifest = decode_manifest(store.read(f"{staged.prefix}/manifest.json"), where="")
    return store, replace(staged, state_sha256=manifest.state_sha256)


def test_opening_recomputes_what_the_manifest_says_of_the_state(untrue: tuple[MemoryStore, StagedCheckpoint]) -> None:
    with pytest.raises(IntegrityError, match=r"do not digest to|its manifest of step 10"):
        open_checkpoint(*untrue, read_policy=ONE_READ)


def test_what_no_trainer_can_open_does_not_verify(untrue: tuple[MemoryStore, StagedCheckpoint]) -> None:
    assert len(verify_checkpoint(*untrue)) == 1


def test_a_start_falls_back_after_an_attempt_that_could_not_open_it(
    untrue: tuple[MemoryStore, StagedCheckpoint],
) -> None:
    store, staged = untrue
    commit(run_log(store), staged)
    fail_to_load(run_log(store))
    found = newest_verified(run_log(store), writer=writer(), sleep=no_sleep)
    assert found is not None and found.step == 5


@pytest.mark.linux
def test_a_second_read_of_a_damaged_object_does_not_come_from_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    run_with_commits(store, 5)
    staged = stage(store, step=10, attempt=1)
    (tmp_path / staged.prefix / "trainer.json").write_bytes(b"{}")
    advised = list[tuple[str, int]]()
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *how: advised.append((name_of(file), how[-1])))
    with pytest.raises(ObjectDamaged, match=r"trainer\.json"):
        open_checkpoint(store, staged, read_policy=ReadPolicy(tries=3, sleep=no_sleep))
    assert advised == [("trainer.json", os.POSIX_FADV_DONTNEED)] * 2


def name_of(descriptor: int) -> str:
    """Return the name of an open file."""
    return os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2]
