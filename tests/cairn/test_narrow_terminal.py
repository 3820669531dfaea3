"""What people read in a terminal of 80 columns: nothing is wider, and no word is broken."""

import re
from collections.abc import Callable
from functools import cache

import pytest

from cairn.storage.stores.local_store import LocalStore
from tests.commands import Ended, run_here
from tests.fabricated_run import store_bard

Shown = Callable[[str, int], Ended]
VERBS = (
    *(f"{verb} bard" for verb in ("status", "explain", "attempts", "checkpoints", "evaluations", "log", "diagnose")),
    *("runs", "models", "models --history", "sweep bard --dry-run", "config", "config training.threads", "sql"),
    "simulate --days 1 --devices 64",
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """What a command line prints in so many columns; each is run once."""
    folder = tmp_path_factory.mktemp("narrow")
    store_bard(LocalStore(folder / "store"))

    @cache
    def show(line: str, columns: int) -> Ended:
        return run_here(tuple(line.split()), folder, {"COLUMNS": str(columns)})

    return show


def words(text: str) -> set[str]:
    return {word.strip(":;,") for word in re.findall(r"\S+", text)}


@pytest.mark.parametrize("line", VERBS)
def test_nothing_is_wider_than_80_columns(shown: Shown, line: str) -> None:
    ended = shown(line, 80)
    assert ended.code == 0 and len(ended.out.splitlines()) >= 2, ended
    assert [line for line in ended.out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("line", VERBS)
def test_no_word_is_broken_at_80_columns(shown: Shown, line: str) -> None:
    assert words(shown(line, 500).out) - words(shown(line, 80).out) - {"–"} == set()
