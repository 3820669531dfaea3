"""From the first line after the arguments are parsed, every notice ends a command in order: its attempts have receipts.

Between the lines of the flow itself: tests/wiring/test_notices.py.
"""

import os
import random
import subprocess
from pathlib import Path

import pytest

from tests.crash.training_command import Command
from tests.processes.fork_server import ROOT
from tests.processes.waiting import patience_seconds

PROGRAM = "tests.crash.noticed_command"
CODES = {"SIGTERM": 75, "SIGINT": 130, "SIGHUP": 75, "SIGUSR1": 75}
SETTINGS = ("training.steps=6", "preemption.signal=SIGUSR1")
PLACES = (
    "train_commands.py:train",
    "training_request.py:resolve_request",
    "prefect_session.py:training_session",
    "run_start.py:open_run",
    "attempt_trainer.py:running",
    "run_decisions.py:finish_run",
)
QUICK = {
    "SIGHUP": "training_request.py:resolve_request",
    "SIGUSR1": "train_commands.py:train",
    "SIGTERM": "prefect_session.py:training_session",
    "SIGINT": "run_start.py:open_run",
}
MOMENTS = int(os.environ.get("CAIRN_TEST_MOMENTS", "50"))


class NoticedCommand(Command):
    """A command that gets a signal at a place of its own, and trains without tensors."""

    def end_at(self, name: str, at: str) -> int:
        """Run it with the signal there; return its exit code."""
        process = self.start_noticed(name, at)
        return process.wait(timeout=patience_seconds())

    def start_noticed(self, name: str, at: str) -> "subprocess.Popen[bytes]":
        """Start it."""
        settings = (word for one in SETTINGS for word in ("--set", one))
        words = (name, at, str(self.folder / "counted"), "train", "run.toml", "--run-id", "bard", *settings)
        return self.start_verb(*words, program=PROGRAM)

    def ends(self) -> list[tuple[str, str | None] | None]:
        """Return reason and charge of every attempt, None for one without a receipt."""
        ended = [record.ended for record in self.state().attempts]
        return [None if one is None else (one.reason, one.decision.charged) for one in ended]


def assert_in_order(command: NoticedCommand, name: str, code: int) -> None:
    """Check the code, and that every attempt has a receipt that names a notice, if it did not complete the run."""
    ends = command.ends()
    allowed = {"completed", "cancelled" if name == "SIGINT" else "preempted"}
    assert None not in ends and {end[0] for end in ends if end} <= allowed, command.output()
    assert code == CODES[name] or (code == 0 and command.state().finished is not None), command.output()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place, marks=[] if QUICK[name] == place else pytest.mark.slow)
        for name in CODES
        for place in PLACES
    ],
)
def test_a_notice_anywhere_in_a_command_ends_it_in_order(tmp_path: Path, name: str, place: str) -> None:
    command = NoticedCommand(tmp_path, "")
    code = command.end_at(name, place)
    assert place in (tmp_path / "counted").read_text(), "the notice was given"
    assert_in_order(command, name, code)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CODES)
def test_a_notice_before_any_line_of_a_command_ends_it_in_order(tmp_path: Path, name: str) -> None:
    def at(line: int, folder: Path) -> NoticedCommand:
        folder.mkdir()
        variables = {"CAIRN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
        command = NoticedCommand(folder, "", environment=variables, forked=False)
        assert_in_order(command, name, command.end_at(name, str(line)))
        return command

    at(0, tmp_path / "never")
    total, seeded = int((tmp_path / "never" / "counted").read_text().split()[0]), random.Random(name)
    for number in range(MOMENTS):
        at(1 + int((number + seeded.random()) * total / MOMENTS), tmp_path / str(number))
