"""The temporary Prefect server, started where none is named: it never outlives the commands that use it."""

import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.crash.prefect_server import copy_untouched_database, own_database
from tests.crash.training_command import RUN, Command
from tests.crash.victims import descendants_with, kill_flow
from tests.processes.waiting import patience_seconds, prompt_seconds, wait_for


@pytest.fixture
def alone(tmp_path: Path) -> Command:
    """A command that is told of no server, truly started."""
    return Command(tmp_path, "", forked=False)


@pytest.fixture
def forked(tmp_path: Path) -> Command:
    """A command that is told of no server; its own has no tables to make."""
    copy_untouched_database(tmp_path)
    return Command(tmp_path, "")


def servers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the command's temporary servers."""
    return descendants_with(process, "cairn.flows.orchestrator.prefect_server")


def kill_server(process: subprocess.Popen[bytes]) -> psutil.Process:
    """Kill the server as soon as there is one; returns which it was."""
    found = list[psutil.Process]()
    wait_for(lambda: bool(found.extend(servers_of(process)) or found), process, "a server")
    found[0].kill()
    return found[0]


def assert_ends_well(command: Command, process: subprocess.Popen[bytes], bits: str) -> None:
    """The command ends within a minute of now on any usual machine, with the run that nobody touched."""
    killed_at = time.monotonic()
    assert process.wait(timeout=patience_seconds()) == 0, command.output()
    assert time.monotonic() - killed_at < prompt_seconds(), command.output()
    assert command.state_sha256() == bits
    assert [attempt.ended.reason for attempt in command.state().attempts if attempt.ended] == ["completed"]
    assert f"promoted: champion → {RUN}@60" in command.output()


def shown_states(command: Command) -> list[str]:
    """Return the states of the flow runs in the server's database."""
    with closing(sqlite3.connect(own_database(command.folder))) as database:
        return [name for (name,) in database.execute("select state_name from flow_run")]


def assert_dies_with(process: subprocess.Popen[bytes]) -> None:
    servers = servers_of(process)
    kill_flow(process)
    _, alive = psutil.wait_procs(servers, timeout=patience_seconds())
    assert servers and not alive


@pytest.mark.slow  # quick witness: `tests/crash/test_late_server.py`, killed before its server answers
def test_a_command_killed_while_its_server_starts_leaves_none(alone: Command) -> None:
    process = alone.start()
    wait_for(lambda: bool(servers_of(process)), process, "a server that starts")
    assert_dies_with(process)


@pytest.mark.slow
def test_a_command_killed_while_it_trains_leaves_no_server(alone: Command) -> None:
    process = alone.train_until(1)
    assert_dies_with(process)


def test_a_run_whose_server_is_killed_trains_to_its_end_and_says_once_that_the_pages_miss_the_rest(
    forked: Command, undisturbed_sha256: str
) -> None:
    process = forked.train_until(12)
    psutil.wait_procs([kill_server(process)], timeout=patience_seconds())
    wait_for(lambda: "pages miss the rest" in forked.output(), process, "the server given up", forked.output)
    forked.let_go("pause@12")
    assert_ends_well(forked, process, undisturbed_sha256)
    assert forked.output().count("the Prefect server is gone") == 1
    assert "ERROR" not in forked.output()


@pytest.mark.slow  # quick witness: the test above
def test_a_server_killed_between_evaluation_and_promotion_is_missed_by_nothing(
    forked: Command, undisturbed_sha256: str
) -> None:
    process = forked.start(CAIRN_FAULTS="pause-evaluator@1")
    wait_for(lambda: forked.state().finished is not None, process, "the end of training", forked.output)
    kill_server(process)
    forked.let_go("pause-evaluator@1")
    assert_ends_well(forked, process, undisturbed_sha256)


@pytest.mark.slow  # quick witness: tests/flows/test_session_server.py
def test_a_second_command_uses_the_server_of_the_first_and_keeps_it_alive_when_that_has_ended(forked: Command) -> None:
    first = forked.train_until(12)
    (server,) = servers_of(first)
    second = forked.start_verb("train", "run.toml", "--run-id", "second", CAIRN_FAULTS="pause@3")
    said = forked.output
    wait_for(lambda: "attempt 1 starts" in said(), second, "the second run", said)
    forked.let_go("pause@12")
    assert first.wait(timeout=patience_seconds()) == 0
    assert server.is_running() and servers_of(second) == []
    forked.store.create("runs/second/faults/pause-3-go.json", b"{}\n")
    assert second.wait(timeout=patience_seconds()) == 0, said()
    assert "a temporary" not in said() and "Prefect server is gone" not in said()
    psutil.wait_procs([server], timeout=patience_seconds())
    assert shown_states(forked) == ["Completed", "Completed"] and not server.is_running()
