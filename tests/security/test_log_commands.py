"""The log of a CI job takes no word of a log, a sample or a name for a command."""

import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from cairn.cli.command import run_command
from cairn.tasks.text.output import CommandFreeStream, break_commands, guard_log, print_facts, print_table
from tests.cairn.hostile_store import AS_JSON, VERBS, HostileStore
from tests.commands import run_process

COMMANDS = [
    "::error::owned", "::set-output name=a::b", "::stop-commands::t", "  ::add-mask::a", "##vso[task.setvariable a]b",
    "x ##[error]owned", "##teamcity[buildStop]",
]  # fmt: skip
WORDS = "\n" + "\n".join(COMMANDS) + "\r::error::after a return\n"
TAKEN = re.compile(r"(?:^|[\r\n])\s*::|##[\w.-]*\[")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> HostileStore:
    store = HostileStore(tmp_path_factory.mktemp("hostile"))
    store.change_all_words(WORDS)
    return store


def in_a_job(print_it: Callable[[], object]) -> str:
    """Return what reaches the job's log, of stdout and stderr."""
    written = io.BytesIO()
    streams = [
        CommandFreeStream(io.TextIOWrapper(written, encoding="utf-8", line_buffering=True))
        for _ in ("stdout", "stderr")
    ]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        print_it()
        for stream in streams:
            stream.flush()
    return written.getvalue().decode()


@pytest.mark.parametrize("line", [*VERBS, *AS_JSON, "sql select * from training_attempts"])
def test_no_verb_prints_a_command(line: str, hostile: HostileStore) -> None:
    arguments = [*line.split(maxsplit=line.startswith("sql") or -1), "--store", str(hostile.root)]
    shown = in_a_job(lambda: run_command(arguments))
    assert shown and not TAKEN.search(shown), TAKEN.findall(shown)


def test_json_is_the_same_document(hostile: HostileStore) -> None:
    entries = json.loads(in_a_job(lambda: run_command(["log", "bard", "--json", "--store", str(hostile.root)])))
    ended = next(entry["body"] for entry in entries if entry["kind"] == "attempt-ended")
    assert ended["detail"].endswith(WORDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_comes_in_pieces_is_broken_as_a_whole_one_is(command: str) -> None:
    shown = in_a_job(lambda: [sys.stdout.write(character) for character in f"before\n{command}"])
    assert shown == break_commands(f"before\n{command}") and not TAKEN.search(shown)


@pytest.mark.parametrize(
    "words", ["a::b", "std::vector", "## Heading", "# [a]", "x = [1::2]", "a: b\n: c", "##", "[#]"]
)
def test_other_words_stay_as_they_are(words: str) -> None:
    assert break_commands(words) == words


def test_a_cell_is_one_line_outside_of_a_job_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a",), [(f"x{WORDS}",)], empty="")
    print_facts([("a", f"x{WORDS}")])
    assert not re.search(r"^::", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("mark", ["CI", "GITHUB_ACTIONS", "TF_BUILD", "TEAMCITY_VERSION"])
def test_a_variable_of_the_system_says_that_it_is_a_job(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/null", "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        guard_log({mark: "false"})
        assert sys.stdout is stream
        guard_log({mark: "true"})
        assert isinstance(sys.stdout, CommandFreeStream)


def test_a_file_gets_the_words_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        guard_log({"CI": "true"})
        assert sys.stdout is stream


def test_the_command_guards_its_output_in_a_job(tmp_path: Path, hostile: HostileStore) -> None:
    ended = run_process(("report", "bard", "--store", str(hostile.root)), tmp_path, {"CI": "true"})
    assert ended.code == 0 and "##vso|[" in ended.out and not TAKEN.search(ended.out)
