"""A rank that waits in a collective call says which at a signal, though its main thread runs no Python."""

import os
import signal
import sys
from pathlib import Path

from tests.processes.fork_server import fork_server
from tests.processes.waiting import wait_for


def test_a_rank_that_waits_writes_its_newest_collective_calls_at_the_signal(tmp_path: Path) -> None:
    path = tmp_path / "output.txt"
    with path.open("wb") as output:
        process = fork_server().popen([sys.executable, "-m", "tests.tasks.waiting_rank"], stdout=output, stderr=output)
    try:
        wait_for(lambda: "waits" in path.read_text(), process, "the rank")
        os.kill(process.pid, signal.SIGQUIT)
        wait_for(lambda: "gloo:all_reduce [[3, 5]]" in path.read_text(), process, "its calls", path.read_text)
    finally:
        process.kill()
        process.wait()
    assert "collective 1 was called, 1 completed" in path.read_text()
