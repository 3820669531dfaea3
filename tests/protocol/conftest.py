"""The quick world for every test of the protocol, and a folder in memory where the system has one."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.protocol.quick_world import quick_world

_IN_MEMORY = "/dev/shm"


@pytest.fixture(autouse=True)
def quick() -> Iterator[pytest.MonkeyPatch]:
    """Nobody sleeps, nothing waits for a disk, operations come in one order."""
    with quick_world() as patch:
        yield patch


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """A folder for tens of thousands of small files: no fault here concerns the disk itself."""
    place = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    with TemporaryDirectory(prefix="cairn-protocol-", dir=place) as folder:
        yield Path(folder)
