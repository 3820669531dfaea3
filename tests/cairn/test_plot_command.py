"""`cairn plot`: a file; `command_lines` has what cannot be drawn, `test_real_commands` what is imported."""

import json
from pathlib import Path

import pytest

from cairn.reports.plots import curve_plot
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun


@pytest.fixture
def quickly_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every picture is a few bytes: for what is done with it."""
    monkeypatch.setattr(curve_plot, "draw_run", lambda *given, **named: b"a picture")


@pytest.mark.parametrize(("name", "begins"), [("curve.png", b"\x89PNG"), ("curve.SVG", b"<?xml")])
def test_the_suffix_says_the_format(
    bard: FabricatedRun, cairn: Cairn, tmp_path: Path, name: str, begins: bytes
) -> None:
    ended = cairn("plot", "bard", name)
    assert ended.code == 0, ended.err
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert name in ended.out


@pytest.mark.usefixtures("quickly_drawn")
def test_with_json_stdout_says_what_was_written(bard: FabricatedRun, cairn: Cairn, tmp_path: Path) -> None:
    said = json.loads(cairn("plot", "bard", "curve.png", "--width", "600", "--height", "450", "--json").out)
    assert said["bytes"] == (tmp_path / "curve.png").stat().st_size
    assert (said["run_id"], said["width_px"], said["height_px"]) == ("bard", 600, 450)
    assert (said["attempts"], said["interruptions"], said["last_step"]) == (2, {"preempted": 1}, 20)


@pytest.mark.usefixtures("quickly_drawn")
def test_a_picture_is_replaced_and_nothing_else_is_left(bard: FabricatedRun, cairn: Cairn, tmp_path: Path) -> None:
    (tmp_path / "curve.png").write_text("older")
    assert cairn("plot", "bard", "curve.png").code == 0
    assert (tmp_path / "curve.png").read_text() == "a picture"
    assert sorted(path.name for path in tmp_path.glob("*curve*")) == ["curve.png"]
