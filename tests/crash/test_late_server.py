"""A run trains before its temporary server answers; it is shown from then on, and a server that fails costs pages."""

import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from cairn.storage.logs.run_state import AttemptRecord
from tests.crash.prefect_server import own_database, own_flow_runs
from tests.crash.training_command import Command
from tests.crash.victims import assert_gone, kill_flow, servers_of, trainers_of
from tests.processes.waiting import patience_seconds, wait_for


def server_of(process: "subprocess.Popen[bytes]") -> psutil.Process:
    """Wait for the command's temporary server, and stop it, so that it never answers."""
    wait_for(lambda: bool(servers_of(process)), process, "a server that starts")
    server = servers_of(process)[0]
    server.suspend()
    return server


def begun(alone: Command) -> "tuple[subprocess.Popen[bytes], psutil.Process]":
    """Start a command whose server does not answer; return once its trainer waits after step 3 of five to a commit."""
    process = alone.start(CAIRN_FAULTS="pause@3")
    server = server_of(process)
    alone.wait_for_fault("pause@3", process)
    return process, server


def only_attempt(alone: Command) -> AttemptRecord:
    (attempt,) = alone.state().attempts
    return attempt


@pytest.mark.slow  # quick witnesses: the test of a server that never comes up, and test_prefect_view.py for the pages
def test_what_was_trained_before_its_server_answered_is_shown_and_the_receipt_names_the_flow_run(
    alone: Command, undisturbed_sha256: str
) -> None:
    process, server = begun(alone)
    assert only_attempt(alone).flow_run_id is None
    server.resume()
    wait_for(lambda: bool(own_flow_runs(alone.folder)), process, "the flow run", alone.output)
    alone.let_go("pause@3")
    assert process.wait(timeout=patience_seconds()) == 0, alone.output()
    assert alone.state_sha256() == undisturbed_sha256
    assert own_flow_runs(alone.folder) == [(only_attempt(alone).flow_run_id, "Completed")]
    with closing(sqlite3.connect(own_database(alone.folder))) as database:
        shown = [name for (name,) in database.execute("select name from task_run order by start_time")]
    assert shown[0].startswith("tokenize-and-split") and shown[1].startswith("train-segment 0-")


@pytest.mark.slow  # quick witnesses: the test above for the attempt, test_failures.py for the signals
@pytest.mark.parametrize(
    ("number", "code", "reason"), [(signal.SIGTERM, 75, "preempted"), (signal.SIGINT, 130, "cancelled")]
)
def test_a_notice_before_the_server_answers_is_in_the_receipt_and_the_same_command_continues(
    alone: Command, undisturbed_sha256: str, number: signal.Signals, code: int, reason: str
) -> None:
    process, server = begun(alone)
    below = [*trainers_of(process), server]
    process.send_signal(number)
    assert process.wait(timeout=patience_seconds()) == code, alone.output()
    assert_gone(below)
    assert (alone.reasons(), only_attempt(alone).flow_run_id) == ([reason], None)
    if number == signal.SIGINT:  # slow, as is a second run of the command
        alone.train()
        assert alone.state_sha256() == undisturbed_sha256


def test_a_command_killed_before_its_run_begins_leaves_no_trainer(tmp_path: Path) -> None:
    command = Command(tmp_path, "")  # whose server takes long to make its tables
    process = command.start()
    wait_for(lambda: bool(trainers_of(process)), process, "a trainer that waits")
    trainers = trainers_of(process)
    kill_flow(process)
    assert command.state().latest_attempt == 0
    assert_gone(trainers)


def test_a_command_killed_before_its_server_answers_leaves_no_process(alone: Command) -> None:
    process, server = begun(alone)
    below = trainers_of(process)
    server.resume()  # a stopped process sees no end of its parent
    kill_flow(process)
    assert_gone([*below, server])


def test_a_server_that_never_comes_up_costs_one_line_and_no_receipt_mentions_it(
    alone: Command, undisturbed_sha256: str
) -> None:
    process, server = begun(alone)
    server.kill()
    alone.let_go("pause@3")
    assert process.wait(timeout=patience_seconds()) == 0, alone.output()
    assert (alone.reasons(), only_attempt(alone).flow_run_id) == (["completed"], None)
    assert alone.state_sha256() == undisturbed_sha256
    assert alone.output().count("the Prefect server is gone") == 1 and "Traceback" not in alone.output()
