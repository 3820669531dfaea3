"""A terminal around `cairn train`: resized it is drawn anew, closed it ends the run in good order."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.crash.prefect_api import environment_of
from tests.crash.training_command import Command
from tests.processes.waiting import patience_seconds, wait_for


class Terminal:
    """The side of a terminal that a person sits at."""

    def __init__(self, person: int) -> None:
        self._person = person
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._closed = threading.Event()
        self._reader.start()

    @property
    def newest(self) -> str:
        """What was drawn last, a line or two."""
        return self.text[-120:]

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._person, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def close(self) -> None:
        self._closed.set()
        self._reader.join()
        os.close(self._person)

    def _read(self) -> None:
        while not self._closed.is_set():
            if select.select([self._person], [], [], 0.1)[0]:
                with suppress(OSError):
                    self.text += os.read(self._person, 65536).decode(errors="replace")


@contextmanager
def trained_at_a_terminal(command: Command, columns: int) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    """Start training in a session of its own, whose terminal this is."""
    person, process_side = pty.openpty()
    terminal = Terminal(person)
    terminal.resize(columns)
    takes_it = "import fcntl, sys, termios; fcntl.ioctl(2, termios.TIOCSCTTY, 0); sys.argv[:] = sys.argv[1:]; "
    runs = "from cairn.cli.command import main; main()"
    arguments = ("train", "run.toml", "--run-id", "bard", "--set", "training.steps=100000")
    process = subprocess.Popen(
        [sys.executable, "-c", takes_it.replace("sys.argv[1:]", "['cairn', *sys.argv[1:]]") + runs, *arguments],
        cwd=command.folder,
        env=environment_of(command, command.api_url, TERM="xterm"),
        stdin=process_side,
        stdout=process_side,
        stderr=process_side,
        start_new_session=True,
    )
    os.close(process_side)
    try:
        yield process, terminal
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_resized_terminal_is_drawn_anew_and_a_closed_one_ends_the_run_as_a_preemption(command: Command) -> None:
    with trained_at_a_terminal(command, 120) as (process, terminal):
        command.wait_until_trained(5, process)
        wait_for(lambda: "tokens/s · ETA" in terminal.text, process, "a wide line")
        terminal.resize(40)
        # How much still fits depends on how long the time left is written: the speed never does.
        wait_for(lambda: "%)" in terminal.newest and "tokens/s" not in terminal.newest, process, "a narrow line")
        assert process.poll() is None
        terminal.close()
        assert process.wait(timeout=patience_seconds()) == 75
    ended = command.receipts()[0]
    assert (ended.reason, ended.decision.action) == ("preempted", "resume")
    assert "terminal was closed" in ended.detail
    assert command.state().resume_step == ended.last_step, "it committed where it was"


@pytest.mark.slow  # a whole run; what stands in for a closed stream: tests/cairn, by every command
@pytest.mark.timeout(300)
def test_a_run_whose_three_standard_streams_are_closed_is_trained_to_its_end(command: Command) -> None:
    words = [sys.executable, "-P", "-m", "cairn.cli.command", "train", "run.toml", "--run-id", "bard"]
    closed = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *words]
    environment = environment_of(command, command.api_url)
    subprocess.run(closed, cwd=command.folder, env=environment, timeout=patience_seconds(), check=True)
    assert command.state().finished is not None
