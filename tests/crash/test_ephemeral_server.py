"""The temporary Prefect server, started where none is named: it never outlives the commands that use it."""

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.crash.prefect_server import own_flow_runs
from tests.crash.training_command import RUN, Command
from tests.crash.victims import assert_gone, kill_flow, servers_of
from tests.processes.waiting import patience_seconds, prompt_seconds, wait_for


@pytest.fixture
def truly_started(tmp_path: Path) -> Command:
    """A command that is told of no server, truly started."""
    return Command(tmp_path, "", forked=False)


def assert_ends_well(command: Command, process: subprocess.Popen[bytes], bits: str) -> None:
    """The command ends within a minute of now on any usual machine, with the run that nobody touched."""
    killed_at = time.monotonic()
    assert process.wait(timeout=patience_seconds()) == 0, command.output()
    assert time.monotonic() - killed_at < prompt_seconds(), command.output()
    assert command.state_sha256() == bits
    assert command.reasons() == ["completed"]
    assert f"promoted: champion → {RUN}@60" in command.output()


def assert_dies_with(process: subprocess.Popen[bytes]) -> None:
    servers = servers_of(process)
    kill_flow(process)
    assert_gone(servers)


@pytest.mark.slow  # quick witness: `tests/crash/test_late_server.py`, killed before its server answers
def test_a_command_killed_while_its_server_starts_leaves_none(truly_started: Command) -> None:
    process = truly_started.start()
    wait_for(lambda: bool(servers_of(process)), process, "a server that starts")
    assert_dies_with(process)


@pytest.mark.slow
def test_a_command_killed_while_it_trains_leaves_no_server(truly_started: Command) -> None:
    process = truly_started.train_until(1)
    assert_dies_with(process)


def test_a_run_whose_server_is_killed_trains_to_its_end_and_says_once_that_the_pages_miss_the_rest(
    alone: Command, undisturbed_sha256: str
) -> None:
    process = alone.train_until(12)
    wait_for(lambda: bool(servers_of(process)), process, "a server")
    servers = servers_of(process)
    servers[0].kill()
    psutil.wait_procs(servers, timeout=patience_seconds())
    wait_for(lambda: "pages miss the rest" in alone.output(), process, "the server given up", alone.output)
    alone.let_go("pause@12")
    assert_ends_well(alone, process, undisturbed_sha256)
    assert alone.output().count("the Prefect server is gone") == 1
    assert "ERROR" not in alone.output()


@pytest.mark.slow  # quick witness: tests/flows/orchestrator/test_session_server.py
def test_a_second_command_uses_the_server_of_the_first_and_keeps_it_alive_when_that_has_ended(alone: Command) -> None:
    first = alone.train_until(12)
    (server,) = servers_of(first)
    second = alone.start_verb("train", "run.toml", "--run-id", "second", CAIRN_FAULTS="pause@3")
    said = alone.output
    wait_for(lambda: "attempt 1 starts" in said(), second, "the second run", said)
    alone.let_go("pause@12")
    assert first.wait(timeout=patience_seconds()) == 0
    assert server.is_running() and servers_of(second) == []
    alone.store.create("runs/second/faults/pause-3-go.json", b"{}\n")
    assert second.wait(timeout=patience_seconds()) == 0, said()
    assert "a temporary" not in said() and "Prefect server is gone" not in said()
    psutil.wait_procs([server], timeout=patience_seconds())
    assert [state for _, state in own_flow_runs(alone.folder)] == ["Completed"] * 2 and not server.is_running()
