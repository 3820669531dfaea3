"""`cairn replay` on runs of the real command; of one that nobody touched: test_replay_command.py."""

import json
import shutil
from pathlib import Path

import pytest

from tests.commands import ROOT, run_here
from tests.crash.training_command import RUN, Command
from tests.processes.waiting import patience_seconds
from tests.text.shakespeare import TINY_SHAKESPEARE

pytestmark = pytest.mark.xdist_group("scarred")  # no other worker waits for that run


def outcomes(command: Command, folder: Path, *, code: int = 0) -> list[tuple[int, int, str]]:
    """Replay the run, with caches and all else of its own in `folder`."""
    ended = run_here(("replay", RUN, "--json", "--store", str(command.folder / "store")), folder, {})
    assert ended.code == code, ended.err
    segments = json.loads(ended.out)["segments"]
    return [(item["from_step"], item["end"]["step"], item["outcome"]) for item in segments]


def test_every_segment_of_the_run_that_met_every_fault_is_equal(scarred: Command, tmp_path: Path) -> None:
    found = outcomes(scarred, tmp_path)
    assert {outcome for _, _, outcome in found} == {"equal"}
    assert {(10, 12), (12, 15)} <= {(first, last) for first, last, _ in found}, "it was preempted after step 12"


@pytest.mark.slow  # its quicker witness is in tests/cairn/operations/test_replay_command.py
def test_a_run_in_which_a_bit_was_flipped_ends_well_and_its_replay_says_where(tmp_path: Path, api_url: str) -> None:
    command = Command(tmp_path, api_url, environment={"CAIRN_FAULTS": "sdc@22"})
    command.train("--set", "training.steps=30")
    found = outcomes(command, tmp_path, code=5)
    assert [segment for segment in found if segment[2] != "equal"] == [(20, 25, "different")]


@pytest.mark.slow  # its quicker witnesses are in tests/cairn/operations/test_replay_command.py
@pytest.mark.parametrize("architecture", ["qwen3"])
def test_a_run_that_was_killed_on_two_processes_is_computed_again_by_one(command: Command, tmp_path: Path) -> None:
    settings = ("--set", "training.steps=20", "--set", "training.processes=2", "--set", "training.micro_batch=2")
    command.train(*settings, CAIRN_FAULTS="kill@12")
    assert outcomes(command, tmp_path) == [(step, step + 5, "equal") for step in range(0, 20, 5)]


@pytest.mark.slow
def test_a_run_on_s3_is_computed_again_with_nothing_cached(remote: Command, tmp_path: Path) -> None:
    remote.train("--set", "training.steps=20")
    process = remote.start_verb("replay", RUN, CAIRN_CACHE=str(tmp_path / "nothing"))
    assert process.wait(timeout=patience_seconds()) == 0, remote.output()
    assert "4 committed segments, 4 equal" in remote.output()


@pytest.mark.slow  # its quicker witnesses are the tests above; the names are read in tests/house/test_files.py
@pytest.mark.parametrize(
    "recipe", ["quickstart", "shakespeare", "tiny-shakespeare", "fast-shakespeare", "wide-shakespeare"]
)
def test_what_a_configuration_of_ours_trains_is_computed_again(command: Command, tmp_path: Path, recipe: str) -> None:
    shutil.copy(ROOT / "deployments" / f"{recipe}.toml", command.folder / "run.toml")
    few = ("training.steps=4", "training.warmup_steps=0", "checkpoint.every_steps=2")
    settings = (f'data.sources=["{TINY_SHAKESPEARE}"]', *few)
    command.train(*(word for setting in settings for word in ("--set", setting)))
    assert outcomes(command, tmp_path) == [(0, 2, "equal"), (2, 4, "equal")]
