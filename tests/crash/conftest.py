"""A real Prefect server for real `cairn train` runs, and the run nobody touched that they must equal."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.prefect_api import Prefect, prefect_command
from tests.crash.training_command import Command


@pytest.fixture(scope="session")
def api_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prefect server on a free port of the loopback, for the whole session."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = tmp_path_factory.mktemp("prefect")
    # The page asks whom it came from; by default it would ask port 4200.
    environment = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_SERVER_UI_API_URL": "/api"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "server.txt").open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    wait_until_healthy(f"http://127.0.0.1:{port}/api/health", home / "server.txt")
    try:
        yield f"http://127.0.0.1:{port}/api"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


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


def wait_until_healthy(url: str, output: Path) -> None:
    """Wait until a Prefect server answers; show what it said where it never does."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError(f"the Prefect server did not start:\n{output.read_text()}")
