"""Given in another folder, or for a mistyped store, every command that reads says where it looked, and what is near."""

import shlex
from pathlib import Path

import pytest

from tests.commands import Cairn

READING = (
    *("runs", "runs --json", "models", "sql 'select run_id from runs'", "watch --once", "compare a b", "rollback"),
    *("status bard", "explain bard", "report bard", "attempts bard", "checkpoints bard", "evaluations bard"),
    *("log bard", "plot bard x.png", "diagnose bard", "simulate bard", "sample bard", "evaluate bard", "promote bard"),
    *("export bard out", "fork bard new", "data bard", "export-tokens bard out", "verify bard", "replay bard"),
    *("sweep bard", "delete bard --dry-run"),
)


@pytest.mark.parametrize("line", READING)
def test_a_store_without_runs_is_named_with_one_nearby(cairn: Cairn, tmp_path: Path, line: str) -> None:
    (tmp_path / "other" / "runs" / "bard" / "log").mkdir(parents=True)
    ended = cairn(*shlex.split(line), "--store", "gone")
    where = f"there are no runs in {tmp_path}/gone, a folder that does not exist; stores nearby: --store other (1 run)"
    assert where in ended.err


def test_a_store_with_nothing_but_empty_folders_is_not_near_itself(cairn: Cairn, tmp_path: Path) -> None:
    (tmp_path / "empty" / "runs" / "bard" / "log").mkdir(parents=True)
    ended = cairn("status", "bard", "--store", "empty")
    assert ended.code == 2 and "there are no runs in" in ended.err and "--store ../empty" not in ended.err
