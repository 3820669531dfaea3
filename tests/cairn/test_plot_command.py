"""`cairn plot`: a file; what cannot be drawn is refused in `command_lines`."""

import json
from pathlib import Path

import pytest

from tests.commands import Cairn, imported_by
from tests.fabricated_run import FabricatedRun


@pytest.mark.parametrize(("name", "begins"), [("curve.png", b"\x89PNG"), ("curve.SVG", b"<?xml")])
def test_the_suffix_says_the_format(
    bard: FabricatedRun, cairn: Cairn, tmp_path: Path, name: str, begins: bytes
) -> None:
    ended = cairn("plot", "bard", name)
    assert ended.code == 0, ended.err
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert name in ended.out


def test_with_json_stdout_says_what_was_written(bard: FabricatedRun, cairn: Cairn, tmp_path: Path) -> None:
    said = json.loads(cairn("plot", "bard", "curve.png", "--width", "600", "--height", "450", "--json").out)
    assert said["bytes"] == (tmp_path / "curve.png").stat().st_size
    assert (said["run_id"], said["width_px"], said["height_px"]) == ("bard", 600, 450)
    assert (said["attempts"], said["interruptions"], said["last_step"]) == (2, {"preempted": 1}, 20)


def test_a_picture_is_replaced_and_nothing_else_is_left(bard: FabricatedRun, cairn: Cairn, tmp_path: Path) -> None:
    (tmp_path / "curve.png").write_text("older")
    assert cairn("plot", "bard", "curve.png").code == 0
    assert sorted(path.name for path in tmp_path.glob("*curve*")) == ["curve.png"]


def test_drawing_needs_neither_torch_nor_the_orchestrator_nor_pyplot(bard: FabricatedRun, tmp_path: Path) -> None:
    imported = imported_by(tmp_path, "plot", "bard", "curve.png")
    assert (tmp_path / "curve.png").exists() and not {"torch", "prefect", "matplotlib.pyplot"} & imported
