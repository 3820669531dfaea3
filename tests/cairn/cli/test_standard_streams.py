"""The real command's surroundings: streams that are closed, full, read by nobody or ASCII, and any umask.

Who stops reading loses the words: what the command does, and the code it leaves with, stay as they were.
"""

import json
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.text.output import escape_unencodable_output, say
from tests.commands import ROOT, chosen_folders, run_process, run_python
from tests.fabricated_run import FabricatedRun, store_bard

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


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
READING = ("status bard", "explain bard", "attempts bard", "--help")
SQL = 'sql "select chr(233) || chr(128512) || chr(8594) as word" --json'
OUR_SIGNS = ("attempts bard", "status bard")
PRINTS_ALL = """
import json, os, shlex, sys, cairn.cli.command as c
for number, line in enumerate(sys.argv[1:]):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(f"{number}.txt", os.O_WRONLY | os.O_CREAT), 1)
        c.main(shlex.split(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def printed(folder: Path, *lines: str, **environment: str) -> dict[str, str]:
    """Return what each command line prints that ends with 0, in processes forked from one with this environment."""
    store_bard(LocalStore(folder / "store"))
    done = run_python(("-c", PRINTS_ALL, *lines), folder, environment)
    assert done.out.split() == ["0"] * len(lines), done.err
    return {line: (folder / f"{number}.txt").read_text(encoding="utf-8") for number, line in enumerate(lines)}


@pytest.fixture(scope="module")
def in_ascii(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What command lines print where the locale knows only ASCII."""
    return printed(tmp_path_factory.mktemp("ascii"), *READING, SQL, **ASCII)


@pytest.fixture(scope="module")
def in_plain_signs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What command lines print where Python's streams know only ASCII."""
    return printed(tmp_path_factory.mktemp("plain"), *OUR_SIGNS, PYTHONIOENCODING="ascii", COLUMNS="80")


@pytest.mark.parametrize("line", READING)
def test_a_verb_escapes_what_an_ascii_stream_cannot_hold(in_ascii: dict[str, str], line: str) -> None:
    assert in_ascii[line].strip() and in_ascii[line].isascii()


def test_json_on_an_ascii_stream_is_the_same_document(in_ascii: dict[str, str]) -> None:
    assert json.loads(in_ascii[SQL]) == [{"word": "é😀→"}]
    assert in_ascii[SQL].isascii()


@pytest.mark.parametrize("line", OUR_SIGNS)
def test_our_own_signs_have_plain_ones_beside_them(in_plain_signs: dict[str, str], line: str) -> None:
    assert in_plain_signs[line].isascii() and "\\u" not in in_plain_signs[line]


def test_a_message_has_plain_signs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    written = BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", TextIOWrapper(written, encoding="ascii", write_through=True))
    escape_unencodable_output()
    say("0 → 1 é")
    assert written.getvalue() == b"0 > 1 \\u00e9\n"


@pytest.mark.parametrize(
    "umask",
    [0o000, pytest.param(0o022, marks=pytest.mark.slow)],  # quick witness: the umask that takes nothing away
    ids=oct,
)
def test_a_command_gives_everybody_no_right_to_write(bard: FabricatedRun, tmp_path: Path, umask: int) -> None:
    before = set(tmp_path.rglob("*"))
    done = run_process(("report", "bard", "--html", "page.html"), tmp_path, {}, umask=umask)
    assert done.code == 0, done.err
    written = {path: stat.S_IMODE(path.stat().st_mode) for path in set(tmp_path.rglob("*")) - before}
    assert tmp_path / "page.html" in written
    assert {path: oct(mode) for path, mode in written.items() if mode & (umask | stat.S_IWOTH)} == {}
