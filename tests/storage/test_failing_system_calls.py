"""System calls of a real process that fail: strace makes one call of one commit after the other return an error.

Its quick witness, with the calls failing inside the process, is `test_local_store_fsync.py`.
"""

import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from cairn.storage.stores.local_store import LocalStore
from tests.processes.waiting import patience_seconds
from tests.storage.builders import RUN, check_invariants, claim, commit, run_log, run_with_commits, stage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.linux,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]
CALLS = {
    "fsync": ("fsync", 12),
    "open": ("openat", 20),
    "write": ("write,writev", 6),
    "link": ("link,linkat", 1),
    "rename": ("rename,renameat,renameat2", 5),
    "mkdir": ("mkdir,mkdirat", 1),
}
"""The calls of each kind, and at least how many of them one commit has."""


def commit_with_failure(folder: Path, calls: str, error: str, number: int) -> tuple[bool, str]:
    """Commit in a process whose call `number` fails; return whether it did fail, and what the process printed."""
    trace = folder.with_suffix(".trace")
    command = [sys.executable, "-m", "tests.storage.one_commit", str(folder)]
    inject = ["-e", f"trace={calls}", "-e", f"inject={calls}:error={error}:when={number}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        tracer = subprocess.Popen(
            ["strace", "-f", "-o", str(trace), "-p", str(process.pid), *inject], stderr=subprocess.PIPE
        )
        assert tracer.stderr is not None
        attached = tracer.stderr.readline()
        if b"attached" not in attached:
            process.kill()
            pytest.skip(f"no process can be traced here: {attached.decode()}")
        said = process.communicate(b"go\n", timeout=patience_seconds())[0].decode()
        tracer.communicate(timeout=patience_seconds())
    return "(INJECTED)" in trace.read_text(), said


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("kind", CALLS)
def test_a_commit_one_of_whose_system_calls_fails_loses_nothing_acknowledged(
    tmp_path: Path, kind: str, error: str
) -> None:
    calls, least = CALLS[kind]
    acknowledged = list[bool]()
    for number in count(1):
        store = LocalStore(tmp_path / str(number))
        prefixes = {record.committed.prefix for record in run_with_commits(store, 5).state.readable}
        failed, said = commit_with_failure(tmp_path / str(number), calls, error, number)
        done = [line.split()[1] for line in said.splitlines() if line.startswith("acknowledged")]
        if not failed:
            break
        acknowledged.append(bool(done))
        assert done or "Error" in said or "NotDurable" in said or "StoreUnavailable" in said, said
        check_invariants(store, prefixes | set(done))
        log = run_log(store)
        commit(log, stage(store, step=10, attempt=claim(log)))
        check_invariants(store, {*prefixes, *done, f"runs/{RUN}/checkpoints/step-00000010-attempt-0002"})
    assert done, f"without a failure it commits: {said}"
    assert len(acknowledged) >= least
    if kind == "fsync":  # the last one is that of the entry's folder
        assert acknowledged == [True] * (len(acknowledged) - 1) + [False]
