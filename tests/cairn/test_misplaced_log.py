"""A run's folder under another run's name, or with entries that name another run, is believed by no command."""

import json
import shutil
from pathlib import Path

import pytest

from cairn.storage.errors import IntegrityError
from cairn.storage.logs.log_entry import check_place
from cairn.storage.stores.local_store import LocalStore
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun

VERBS = ("status", "verify", "explain", "export", "train")


@pytest.fixture
def misplaced(bard: FabricatedRun, store: LocalStore) -> str:
    """The name of a folder into which the whole run was copied."""
    runs = Path(store.local_path("runs") or "")
    shutil.copytree(runs / "bard", runs / "mallory")
    return "mallory"


@pytest.mark.parametrize("verb", VERBS)
def test_a_copy_under_another_name_is_refused(misplaced: str, cairn: Cairn, verb: str, tmp_path: Path) -> None:
    more = {"export": [misplaced, str(tmp_path / "out")], "train": ["--run-id", misplaced]}.get(verb, [misplaced])
    ended = cairn(verb, *more)
    assert ended.code == 5, ended
    assert "its entries are those of 'bard', and it lies where mallory should" in ended.err


def test_the_list_of_runs_says_so_and_shows_the_others(misplaced: str, cairn: Cairn) -> None:
    listed = {run["run_id"]: run["state"] for run in json.loads(cairn("runs", "--json").out)}
    assert listed[misplaced] == "unreadable" and listed["bard"] != "unreadable"


@pytest.mark.parametrize("name", ["<script>", "[a](b)", "\x1b[2J", "../bard", "Bard", "bard ", "b" * 10_000])
def test_the_name_that_a_log_gives_itself_is_printed_harmlessly(name: str) -> None:
    with pytest.raises(IntegrityError) as caught:
        check_place("runs/bard/log", "bard", name)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 250
