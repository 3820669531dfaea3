"""Durable system calls of a whole run that fail, one after the other: flow, trainer and evaluator under strace.

The quick witness is `tests/storage/stores/test_local_store_fsync.py`.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psutil
import pytest

from cairn.storage.checkpoints.checkpoint import verify_checkpoint
from tests.crash.training_command import Command
from tests.processes.fork_server import SYNCS
from tests.processes.waiting import patience_seconds, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.linux,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]
CALLS = {
    "fsync": "fsync,fdatasync",
    "link": "link,linkat",
    "rename": "rename,renameat,renameat2",
    "mkdir": "mkdir,mkdirat",
}
"""What makes a commit durable, by kind. strace counts the calls of each thread by itself; retries have new ones."""
SHORT = ("--set", "training.steps=12", "--set", "checkpoint.every_steps=4")
RESUMABLE, MAY_BE_TRIED_AGAIN = 75, 1


@contextmanager
def failing(process: "subprocess.Popen[bytes]", trace: Path, inject: str) -> Iterator[None]:
    """Have a call of a process, or of one that descends from it, fail as `inject` says, and no more once one has."""
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    attach = [word for pid in family for word in ("-p", str(pid))]
    calls = inject.partition(":")[0]
    command = ["strace", "-f", "-o", str(trace), "-e", f"trace={calls}", "-e", f"inject={inject}", *attach]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    for _ in family:
        if "attached" not in (said := tracer.stderr.readline()):
            process.kill()
            pytest.skip(f"no process can be traced here: {said}")
    try:
        yield
        wait_until(lambda: has_failed(trace) or process.poll() is not None, "a call that fails, or the end")
    finally:
        tracer.kill()  # the kernel then lets all go on; strace itself hangs now and then when it detaches
        tracer.communicate()


def has_failed(trace: Path) -> bool:
    """Whether a call was made to fail."""
    return trace.exists() and "(INJECTED)" in trace.read_text()


def said_to_be_committed(command: Command) -> set[str]:
    """Return the checkpoints that the command told its user of."""
    return set(re.findall(r"committed step \d+ of .*: (\S+)", command.output()))


@pytest.fixture(scope="module")
def short_sha256(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> str:
    """The digest of the short run nobody touched."""
    command = Command(tmp_path_factory.mktemp("short"), api_url)
    command.train(*SHORT)
    return command.state_sha256()


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("kind", CALLS)
def test_a_run_one_of_whose_durable_calls_fails_ends_with_the_same_bits_and_loses_nothing_it_told_of(
    tmp_path: Path, api_url: str, short_sha256: str, kind: str, error: str
) -> None:
    for number in count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        command, trace = Command(folder, api_url, environment={SYNCS: "1"}), folder / "trace"
        process = command.train_until(7, *SHORT)
        with failing(process, trace, f"{CALLS[kind]}:error={error}:when={number}"):
            command.let_go("pause@7")
        code = process.wait(timeout=patience_seconds())
        told = said_to_be_committed(command)
        assert code in (0, MAY_BE_TRIED_AGAIN, RESUMABLE), command.output()
        command.train(*SHORT)
        assert command.state_sha256() == short_sha256
        readable = {record.committed.prefix: record.committed.reference for record in command.state().readable}
        assert told <= readable.keys()
        assert [verify_checkpoint(command.store, reference) for reference in readable.values()] == [()] * len(readable)
        if not has_failed(trace):
            break
    assert number > 1, "no call was there to fail"
