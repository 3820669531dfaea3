import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun

VERBS = [
    ("runs",),
    ("status", "bard"),
    ("attempts", "bard"),
    ("checkpoints", "bard"),
    ("evaluations", "bard"),
    ("explain", "bard"),
    ("report", "bard"),
    ("log", "bard"),
    ("note", "bard"),
    ("models",),
]
IDS = [verb[0] for verb in VERBS]


@pytest.mark.parametrize("verb", VERBS, ids=IDS)
def test_with_json_stdout_is_one_document_and_stderr_is_silent(
    bard: FabricatedRun, cairn: Cairn, verb: tuple[str, ...]
) -> None:
    ended = cairn(*verb, "--json")
    assert (ended.code, ended.err, bool(json.loads(ended.out))) == (0, "", True)


@pytest.mark.parametrize("verb", VERBS, ids=IDS)
def test_people_get_lines_they_can_read(bard: FabricatedRun, cairn: Cairn, verb: tuple[str, ...]) -> None:
    ended = cairn(*verb)
    assert ended.code == 0 and len(ended.out.splitlines()) >= 2


def test_the_log_is_printed_entry_by_entry_as_it_lies_in_the_store(
    bard: FabricatedRun, cairn: Cairn, tmp_path: Path
) -> None:
    entries = json.loads(cairn("log", "bard", "--json").out)
    newest_first = sorted((tmp_path / "store" / "runs" / "bard" / "log").iterdir(), reverse=True)
    stored = [json.loads(path.read_text()) for path in newest_first]
    assert entries == stored


def test_an_unknown_run_is_refused_with_the_runs_there_are(bard: FabricatedRun, cairn: Cairn) -> None:
    ended = cairn("status", "brad")
    assert ended.code == 2 and "runs here: bard" in ended.err


def test_a_run_id_that_leaves_the_store_is_refused(cairn: Cairn) -> None:
    assert cairn("status", "../elsewhere").code == 2


@pytest.mark.unsound_log
def test_a_changed_entry_is_an_integrity_error(bard: FabricatedRun, cairn: Cairn, tmp_path: Path) -> None:
    entry = tmp_path / "store" / "runs" / "bard" / "log" / "9999999997.json"
    entry.write_text(entry.read_text().replace("here", "there"))
    assert cairn("status", "bard").code == 5


def test_an_unknown_verb_is_a_usage_error_without_a_traceback(cairn: Cairn) -> None:
    ended = cairn("frobnicate")
    assert ended.code == 2 and "Traceback" not in ended.err


def test_an_error_shows_its_traceback_when_asked_to(cairn: Cairn) -> None:
    assert "Traceback" in cairn("status", "nobody", CAIRN_DEBUG="1").err


def test_help_lists_the_verbs(cairn: Cairn) -> None:
    assert all(verb in cairn("--help").out for verb in ("train", "status", "sample", "doctor"))


def test_the_version_is_printed(cairn: Cairn) -> None:
    assert cairn("--version").out.startswith("cairn ")


def test_a_reader_that_closes_the_pipe_early_ends_the_verb_quietly(bard: FabricatedRun, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "cairn.cli.command", "log", "bard", "--store", str(tmp_path / "store")],
        cwd=Path(__file__).parents[2],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert "Traceback" not in done.stderr
