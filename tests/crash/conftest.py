"""A real Prefect server for real `cairn train` runs, and the run nobody touched that they must equal."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.prefect_api import Prefect, prefect_command
from tests.crash.prefect_server import Server
from tests.crash.training_command import Command


@pytest.fixture(scope="session")
def api_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prefect server on a free port of the loopback, for the whole session."""
    # The page asks whom it came from; by default it would ask port 4200.
    server = Server(tmp_path_factory.mktemp("prefect"), PREFECT_SERVER_UI_API_URL="/api")
    yield server.url
    server.stop()


@pytest.fixture
def command(tmp_path: Path, api_url: str) -> Command:
    """A fresh folder to train in."""
    return Command(tmp_path, api_url)


@pytest.fixture
def prefect(command: Command, api_url: str) -> Prefect:
    """The `prefect` command, as `make up` uses it, for this test's store."""
    return prefect_command(command, api_url)


@pytest.fixture
def deployed(prefect: Prefect) -> None:
    """The work pool and all deployments."""
    prefect("work-pool", "create", "cairn", "--type", "process", "--overwrite")
    prefect("--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")


@pytest.fixture(scope="session")
def undisturbed_sha256(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> str:
    """The digest of the run nobody touched."""
    command = Command(tmp_path_factory.mktemp("undisturbed"), api_url)
    command.train()
    return command.state_sha256()
