"""What people read in a terminal of 80 columns: nothing is wider, and no word is broken."""

import re

import pytest

from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun

VERBS = (
    *(f"{verb} bard" for verb in ("status", "explain", "attempts", "checkpoints", "evaluations", "log", "diagnose")),
    *("runs", "models", "models --history", "sweep bard --dry-run", "config", "config training.threads", "sql"),
    "simulate --days 1",
)


def words(text: str) -> set[str]:
    return {word.strip(":;,") for word in re.findall(r"\S+", text)}


@pytest.mark.parametrize("line", VERBS)
def test_nothing_is_wider_than_80_columns(bard: FabricatedRun, cairn: Cairn, line: str) -> None:
    ended = cairn(*line.split(), COLUMNS="80")
    assert ended.code == 0, ended.err
    assert [line for line in ended.out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("line", VERBS)
def test_no_word_is_broken_at_80_columns(bard: FabricatedRun, cairn: Cairn, line: str) -> None:
    wide, narrow = (words(cairn(*line.split(), COLUMNS=columns).out) for columns in ("500", "80"))
    assert wide - narrow - {"–"} == set()
