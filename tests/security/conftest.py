"""A run to look at from outside: `cairn train` as a user starts it."""

from pathlib import Path

import pytest

from tests.crash.prefect_server import shared_server
from tests.crash.training_command import Command


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """A fresh folder to train in, with the session's Prefect server."""
    return Command(tmp_path, shared_server())


@pytest.fixture
def command_with_own_server(tmp_path: Path) -> Command:
    """A fresh folder to train in; each command starts a Prefect server of its own."""
    return Command(tmp_path, "")
