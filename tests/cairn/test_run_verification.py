"""What `cairn verify` finds beyond checkpoints: the weights a run began from."""

import hashlib
from dataclasses import replace

import pytest

from cairn.operations.run_verification import verify_run
from storage.logs.run_log import RunLog
from storage.stores.memory_store import MemoryStore
from tests.entries import writer
from tests.storage.builders import opened

WEIGHTS = b"the weights it began from"
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
KEY = f"initial/{SHA256}/weights.safetensors"


@pytest.fixture
def store() -> MemoryStore:
    """A run that was opened with weights of its own."""
    store = MemoryStore("begun")
    body = replace(opened(), initial_weights_sha256=SHA256)
    RunLog(store, body.run_id).append(lambda state: body, writer=writer())
    return store


def initial_problems(store: MemoryStore) -> list[str]:
    return [problem for problem in verify_run(store, opened().run_id).problems if problem.startswith("initial/")]


def test_the_weights_a_run_began_from_are_hashed_again(store: MemoryStore) -> None:
    store.write(KEY, WEIGHTS)
    assert initial_problems(store) == []


def test_a_flipped_byte_in_them_is_named(store: MemoryStore) -> None:
    store.write(KEY, b"T" + WEIGHTS[1:])
    assert [KEY in problem for problem in initial_problems(store)] == [True]


def test_their_absence_is_named(store: MemoryStore) -> None:
    assert ["missing" in problem for problem in initial_problems(store)] == [True]
