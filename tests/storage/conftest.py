"""Both stores that need no server, under one name; every test of the log and of checkpoints runs on both."""

import os
from pathlib import Path

import pytest

from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind."""
    return MemoryStore("test") if request.param == "memory" else LocalStore(tmp_path / "store")


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync where a test kills processes, not power: the page cache outlives a process."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
