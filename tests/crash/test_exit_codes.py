"""The exit codes that only a command with an orchestrator leaves with, from stores made by hand: nothing is trained.

4: ending a lost attempt spends the last of its budget. 7: the owner shows life. The others of CONTRACT come from real
commands in tests/flows (0, 1, 2, 3, 5, 6, 75, 130) and, after real training, beside this file (0, 4, 7, 75, 130).
"""

import http.server
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.crash.live_owner import QUICK_BEATS, beating
from tests.crash.training_command import Command
from tests.crash.victims import assert_gone
from tests.entries import gone_placement
from tests.fabricated_run import fabricate
from tests.processes.waiting import patience_seconds, wait_for

pytestmark = pytest.mark.xdist_group("exit-codes")  # its refused command is run once for its tests


class ShortLivedApi:
    """A Prefect API on a free port of the loopback, which is gone once it has said its version."""

    def __init__(self) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                return

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-length", "7")
                self.end_headers()
                self.wfile.write(b'"3.8.8"')

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/api"
        threading.Thread(target=self._answer_once, daemon=True).start()

    def _answer_once(self) -> None:
        self._server.handle_request()
        self._server.server_close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A command whose lost attempt has spent its budget, its code, and all processes that it had."""

    command: Command
    code: int
    children: list[psutil.Process]


@pytest.fixture(scope="module")
def refused(api_url: str, tmp_path_factory: pytest.TempPathFactory) -> Refused:
    command = Command(tmp_path_factory.mktemp("refused"), api_url)
    fabricate(command.store, "bard").start(placement=gone_placement())
    process = command.start_verb("train", "--run-id", "bard", *QUICK_BEATS, "--set", "budgets.lost.retries=0")
    children = children_while(process)
    return Refused(command=command, code=process.returncode, children=children)


def children_while(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """Return every process below the command that was seen until it ended."""
    seen: dict[int, psutil.Process] = {}
    while process.poll() is None:
        try:
            seen |= {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            break
        time.sleep(0.05)
    process.wait(timeout=patience_seconds())
    return list(seen.values())


def continued(command: Command, *extra: str) -> int:
    return command.start_verb("train", "--run-id", "bard", *QUICK_BEATS, *extra).wait(timeout=patience_seconds())


def test_a_spent_budget_leaves_with_4_and_says_which(refused: Refused) -> None:
    said, ended = refused.command.output(), refused.command.receipts()[-1]
    assert (refused.code, ended.reason, ended.decision.action) == (4, "lost", "stop"), said
    assert "lost" in said and "Traceback" not in said


def test_a_run_that_is_refused_while_its_trainer_waits_leaves_no_process(refused: Refused) -> None:
    assert_gone(refused.children)


def test_a_live_owner_leaves_with_7_and_says_where_it_is(command: Command) -> None:
    run = fabricate(command.store, "bard")
    run.start(host="elsewhere")
    with beating(run):
        assert continued(command) == 7, command.output()
    assert "attempt 1 on elsewhere" in command.output() and "Traceback" not in command.output()
    assert command.state().open_attempt is not None


def test_a_command_told_to_go_after_it_has_said_why_it_leaves_keeps_its_code(command: Command) -> None:
    run = fabricate(command.store, "bard")
    run.start(host="elsewhere")
    with beating(run):
        process = command.start_verb("train", "--run-id", "bard", *QUICK_BEATS)
        wait_for(lambda: "attempt 1 on elsewhere" in command.output(), process, "the refusal")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=patience_seconds()) == 7, command.output()


@pytest.mark.slow  # quick witness: `tests/crash/test_ephemeral_server.py`, killed while the run trains
def test_a_server_that_dies_after_its_first_answer_changes_no_exit_code(tmp_path: Path) -> None:
    command = Command(tmp_path, ShortLivedApi().url, environment={"PREFECT_CLIENT_MAX_RETRIES": "1"})
    fabricate(command.store, "bard").start(placement=gone_placement())
    assert continued(command, "--set", "budgets.lost.retries=0") == 4, command.output()
    assert "Traceback" not in command.output()
