"""`cairn replay` on runs of the real command: the one nobody touched, and the one that met every fault."""

import json
from pathlib import Path

import pytest

from tests.commands import run_here
from tests.crash.training_command import RUN, STEPS, Command

pytestmark = pytest.mark.xdist_group("scarred")  # no other worker waits for that run


def verdicts(command: Command, folder: Path) -> list[tuple[int, int, str]]:
    """Replay the run, with caches and all else of its own in `folder`."""
    ended = run_here(("replay", RUN, "--json", "--store", str(command.folder / "store")), folder, {})
    assert ended.code == 0, ended.err
    return [(item["from_step"], item["to_step"], item["verdict"]) for item in json.loads(ended.out)["segments"]]


def test_every_segment_of_the_run_nobody_touched_is_equal(undisturbed: Command, tmp_path: Path) -> None:
    steps = range(0, STEPS, 5)
    assert verdicts(undisturbed, tmp_path) == [(step, step + 5, "equal") for step in steps]


def test_every_segment_of_the_run_that_met_every_fault_is_equal(scarred: Command, tmp_path: Path) -> None:
    found = verdicts(scarred, tmp_path)
    assert {verdict for _, _, verdict in found} == {"equal"}
    assert {(10, 12), (12, 15)} <= {(first, last) for first, last, _ in found}, "it was preempted after step 12"
