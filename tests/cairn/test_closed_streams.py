"""Who stops reading loses the words: what the command does, and the code it leaves with, stay as they were."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import ROOT, chosen_folders
from tests.fabricated_run import FabricatedRun

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


def run(
    folder: Path, *words: str, redirection: str = "", stdout: int | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words, its streams as a shell's redirection says."""
    shell = ["sh", "-c", f"exec {shlex.join([sys.executable, *words])} {redirection}"]
    environment = {**os.environ, **chosen_folders(folder), "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(shell, env=environment, stdout=stdout, stderr=-1, text=True, timeout=240, check=False)


@pytest.fixture
def damaged(bard: FabricatedRun, tmp_path: Path) -> FabricatedRun:
    [shard] = (tmp_path / "store").rglob("step-00000020-attempt-0001/weights-*")
    shard.write_bytes(b"?")
    return bard


CLOSED = [
    ">&-",
    pytest.param("2>&-", marks=pytest.mark.slow),  # quick witness: the next
    ">&- 2>&-",
    pytest.param("2> /dev/full", marks=pytest.mark.linux),
]


@pytest.mark.parametrize("redirection", CLOSED)
def test_a_verb_leaves_with_the_code_of_what_it_found(damaged: FabricatedRun, tmp_path: Path, redirection: str) -> None:
    lines = {"verify bard --json": 5, "status nobody": 2, "status bard --json": 0}
    run(tmp_path, "-c", FORKS, str(tmp_path / "codes.txt"), *lines, redirection=redirection)
    assert [int(code) for code in (tmp_path / "codes.txt").read_text().split()] == list(lines.values())


@pytest.fixture
def nobody_reads() -> Iterator[int]:
    """The writing end of a pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def test_a_reader_that_has_gone_changes_no_code_and_costs_no_words(
    damaged: FabricatedRun, tmp_path: Path, nobody_reads: int
) -> None:
    done = run(tmp_path, "-m", "cairn.cli.command", "verify", "bard", "--json", stdout=nobody_reads)
    assert (done.returncode, "Traceback" in done.stderr) == (5, False)


@pytest.mark.linux  # writes to /dev/full
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_finds_no_room_is_an_error_in_one_line(
    bard: FabricatedRun, tmp_path: Path, unbuffered: str
) -> None:
    words = ("-m", "cairn.cli.command", "status", "bard", "--json")
    ended = run(tmp_path, *words, redirection="> /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert ended.returncode == 1
    assert ended.stderr == "cairn: the output could not be written: No space left on device\n"


@pytest.mark.linux  # writes to /dev/full
@pytest.mark.parametrize("words", [pytest.param("runs", marks=pytest.mark.slow), "--help"])  # quick witness: the other
def test_a_text_that_finds_no_room_is_an_error_in_one_line(bard: FabricatedRun, tmp_path: Path, words: str) -> None:
    ended = run(tmp_path, "-m", "cairn.cli.command", words, redirection="> /dev/full")
    assert (ended.returncode, ended.stderr.count("\n"), "No space left" in ended.stderr) == (1, 1, True)


def test_a_help_whose_reader_has_gone_is_done(tmp_path: Path, nobody_reads: int) -> None:
    done = run(tmp_path, "-m", "cairn.cli.command", "train", "--help", stdout=nobody_reads)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_for_which_warnings_are_errors_says_nothing_of_its_own_streams(
    bard: FabricatedRun, tmp_path: Path
) -> None:
    assert run(tmp_path, "-W", "error", "-m", "cairn.cli.command", "runs").stderr == ""
