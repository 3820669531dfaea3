"""`cairn plot`: a file or a reason why not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun

PLOT_LISTS_LOADED = """
import sys, cairn.cli.command as c
assert c.run_command(["plot", "bard", sys.argv[2], "--store", sys.argv[1]]) == 0
print(*sys.modules)
"""


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("bard", "curve.jpg"), "curve.jpg: must end in .png or .svg", id="suffix"),
        pytest.param(("bard", "no/curve.png"), "its folder does not exist", id="folder"),
        pytest.param(("bard", "curve.png", "--width", "10"), "--width 10: must be 300 to 10000", id="width"),
        pytest.param(("brad", "curve.png"), "runs here: bard", id="run"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(
    bard: FabricatedRun, cairn: Cairn, arguments: tuple[str, ...], said: str
) -> None:
    ended = cairn("plot", *arguments)
    assert ended.code == 2 and said in ended.err


def test_drawing_needs_neither_torch_nor_the_orchestrator_nor_pyplot(bard: FabricatedRun, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLOT_LISTS_LOADED, str(tmp_path / "store"), str(tmp_path / "curve.png")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"torch", "prefect", "matplotlib.pyplot"} & set(done.stdout.split()) == set()
