"""The temporary Prefect server, started where none is named: it never outlives the command, however that dies."""

import subprocess
from pathlib import Path

import psutil
import pytest

from tests.crash.training_command import Command
from tests.crash.victims import kill_flow
from tests.processes.waiting import patience_seconds, wait_for


@pytest.fixture
def alone(tmp_path: Path) -> Command:
    """A command that is told of no server, truly started."""
    return Command(tmp_path, "", forked=False)


def servers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the command's temporary servers."""
    children = psutil.Process(process.pid).children()
    return [child for child in children if "flows.orchestrator.ephemeral_server" in child.cmdline()]


def assert_dies_with(process: subprocess.Popen[bytes]) -> None:
    servers = servers_of(process)
    kill_flow(process)
    _, alive = psutil.wait_procs(servers, timeout=patience_seconds())
    assert servers and not alive


def test_a_command_killed_while_its_server_starts_leaves_none(alone: Command) -> None:
    process = alone.start()
    wait_for(lambda: bool(servers_of(process)), process, "a server that starts")
    assert_dies_with(process)


@pytest.mark.slow
def test_a_command_killed_while_it_trains_leaves_no_server(alone: Command) -> None:
    process = alone.train_until(1)
    assert_dies_with(process)
