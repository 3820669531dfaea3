"""The Prefect API goes away in the middle of a run, and comes back or not: training does not care, nothing is lost."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.prefect_server import Server
from tests.crash.training_command import STEPS, Command
from tests.processes.waiting import patience_seconds, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
AWAY_SECONDS = 25.0
TWO_EVALUATIONS = ("--set", "evaluation.every_commits=6")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of this test's own."""
    server = Server(tmp_path)
    yield server
    if server.is_alive:
        server.kill()


@pytest.fixture
def command(tmp_path: Path, server: Server) -> Command:
    """A fresh folder to train in, told of that server; Prefect gives up on it sooner than it would by itself."""
    return Command(tmp_path, server.url, environment={"PREFECT_CLIENT_MAX_RETRIES": "4"}, forked=False)


def started(command: Command) -> subprocess.Popen[bytes]:
    """Start to train, and return at step 12, where the trainer waits for `let_go`."""
    return command.train_until(12, *TWO_EVALUATIONS)


def wait_until_nothing_is_left_to_do(command: Command, process: subprocess.Popen[bytes]) -> None:
    """Train on until the log holds the end, the receipt and both evaluations, and the alias points at the run."""
    command.let_go("pause@12")
    wait_for(lambda: is_done(command), process, "the end", command.output)


def is_done(command: Command) -> bool:
    """Whether everything a run does is on record."""
    state = command.state()
    receipts = [attempt.ended for attempt in state.attempts]
    return (
        state.finished is not None
        and None not in receipts
        and len(state.evaluations) == 2
        and command.champion() is not None
    )


def assert_ends_as_if_prefect_had_been_there(
    command: Command, process: "subprocess.Popen[bytes]", undisturbed_sha256: str
) -> None:
    """The command leaves with 0; nothing is lost or doubled, and the bits are those of the run nobody touched."""
    assert process.wait(timeout=patience_seconds()) == 0, command.output()
    assert command.state_sha256() == undisturbed_sha256
    state = command.state()
    assert command.reasons() == ["completed"]
    assert [record.committed.step for record in state.checkpoints] == list(range(5, STEPS + 1, 5))
    assert [item.step for item in state.evaluations] == [30, 60]
    assert state.refused == () and state.failed_evaluations == ()


def stop(server: Server) -> None:
    server.signal(signal.SIGSTOP)


def wake(server: Server) -> None:
    server.signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("leave", "come_back"), [(Server.kill, Server.start), (stop, wake)], ids=["it is dead", "it hangs"]
)
def test_a_run_is_trained_evaluated_and_promoted_while_the_server_is_away_and_ends_when_it_is_back(
    command: Command,
    server: Server,
    undisturbed_sha256: str,
    leave: Callable[[Server], None],
    come_back: Callable[[Server], None],
) -> None:
    process = started(command)
    leave(server)
    left_at = time.monotonic()
    wait_until_nothing_is_left_to_do(command, process)
    time.sleep(max(0.0, AWAY_SECONDS - (time.monotonic() - left_at)))
    come_back(server)
    assert_ends_as_if_prefect_had_been_there(command, process, undisturbed_sha256)


def test_a_server_that_never_comes_back_costs_nothing_but_its_list_of_runs(
    tmp_path: Path, server: Server, undisturbed_sha256: str
) -> None:
    command = Command(tmp_path, server.url, environment={"PREFECT_CLIENT_MAX_RETRIES": "1"}, forked=False)
    process = started(command)
    server.kill()
    wait_until_nothing_is_left_to_do(command, process)
    assert_ends_as_if_prefect_had_been_there(command, process, undisturbed_sha256)
    assert "Prefect does not answer" in command.output()


def test_without_a_server_a_run_begins_all_the_same(command: Command, server: Server, undisturbed_sha256: str) -> None:
    server.kill()
    assert_ends_as_if_prefect_had_been_there(command, command.start(*TWO_EVALUATIONS), undisturbed_sha256)
    assert "is not shown there" in command.output()
