"""Who stops reading loses the words: what the command does, and the code it leaves with, stay as they were."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fabricated_run import FabricatedRun


def command(tmp_path: Path, line: str, redirection: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CAIRN_STORE": str(tmp_path / "store"), "PYTHONPATH": str(Path(__file__).parents[2])}
    shell = ["sh", "-c", f"exec {shlex.quote(sys.executable)} -m cairn.cli.command {line} {redirection}"]
    return subprocess.run(shell, env={**environment, **variables}, check=False, timeout=240, stderr=-1, text=True)


FORKS = """
import os, pathlib, sys, cairn.cli.command as c
codes = pathlib.Path(sys.argv[1])
for line in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        c.main(line.split())
    with codes.open("a") as file:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=file)
"""


def codes_of(tmp_path: Path, lines: list[str], redirection: str) -> list[int]:
    """Exit codes of command lines with these streams, each in a process forked after the imports."""
    codes = tmp_path / "codes.txt"
    words = [sys.executable, "-c", FORKS, str(codes), *lines]
    environment = {**os.environ, "CAIRN_STORE": str(tmp_path / "store"), "PYTHONPATH": str(Path(__file__).parents[2])}
    shell = ["sh", "-c", f"exec {shlex.join(words)} {redirection}"]
    subprocess.run(shell, env=environment, check=False, timeout=240, stderr=subprocess.DEVNULL)
    return [int(code) for code in codes.read_text().split()]


@pytest.fixture
def damaged(bard: FabricatedRun, tmp_path: Path) -> FabricatedRun:
    [shard] = (tmp_path / "store").rglob("step-00000020-attempt-0001/weights-*")
    shard.write_bytes(b"?")
    return bard


@pytest.mark.parametrize(
    "redirection", [">&-", "2>&-", ">&- 2>&-", pytest.param("2> /dev/full", marks=pytest.mark.linux)]
)
def test_a_verb_leaves_with_the_code_of_what_it_found(damaged: FabricatedRun, tmp_path: Path, redirection: str) -> None:
    lines = {"verify bard --json": 5, "status nobody": 2, "status bard --json": 0}
    assert codes_of(tmp_path, list(lines), redirection) == list(lines.values())


def test_a_reader_that_has_gone_changes_no_code(damaged: FabricatedRun, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "CAIRN_STORE": str(tmp_path / "store")}
    arguments = [sys.executable, "-m", "cairn.cli.command", "verify", "bard", "--json"]
    root = Path(__file__).parents[2]
    done = subprocess.run(arguments, cwd=root, env=environment, stdout=writing, check=False, timeout=240)
    os.close(writing)
    assert done.returncode == 5


@pytest.mark.linux  # writes to /dev/full
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_finds_no_room_is_an_error_in_one_line(
    bard: FabricatedRun, tmp_path: Path, unbuffered: str
) -> None:
    ended = command(tmp_path, "status bard --json", "> /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert ended.returncode == 1
    assert ended.stderr == "cairn: the output could not be written: [Errno 28] No space left on device\n"
