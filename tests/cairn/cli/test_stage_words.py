"""What a run draws, from each stage's step on, in the words of explain, report and --dry-run."""

import json
from pathlib import Path

import pytest

from cairn.storage.stores.local_store import LocalStore
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun, fabricate

STAGES = ('data.sources=["web.txt", "books.txt"]', "data.weights=[3, 1]", "data.stages=[{step = 5, weights = [0, 2]}]")
FP32 = 'precision = "fp32"\nkernels = "stock"\n'  # nothing is measured to choose them
WORDS = "from step 0 75.00% web.txt, 25.00% books.txt; from step 5 100.00% books.txt"


@pytest.fixture
def staged(store: LocalStore) -> FabricatedRun:
    run = fabricate(store, "bard", overrides=STAGES)
    run.start(overrides=STAGES)
    return run


@pytest.mark.parametrize("verb", ["explain", "report"])
def test_explain_and_report_say_what_is_drawn_from_each_stage_on(
    verb: str, staged: FabricatedRun, cairn: Cairn
) -> None:
    assert WORDS in " ".join(cairn(verb, "bard").out.split())
    stages = json.loads(cairn(verb, "bard", "--json").out)["mixture"]
    assert [stage["from_step"] for stage in stages] == [0, 5]


def plan(cairn: Cairn, folder: Path, data: str, *settings: str) -> str:
    """Plan a run on these data; three texts are there."""
    for name in ("web", "books", "held"):
        (folder / f"{name}.txt").write_text("stone upon stone " * 200)
    (folder / "run.toml").write_text(f'[data]\n{data}\ntokenizer = "bytes"\n[training]\nsteps = 9\n{FP32}')
    options = (part for setting in settings for part in ("--set", setting))
    return " ".join(cairn("train", "run.toml", "--dry-run", *options).out.split())


def test_a_dry_run_says_what_will_be_drawn_from_each_stage_on(cairn: Cairn, tmp_path: Path) -> None:
    assert WORDS in plan(cairn, tmp_path, 'sources = ["a"]', *STAGES)


def test_a_run_without_weights_draws_from_all_text_alike(store: LocalStore, cairn: Cairn) -> None:
    fabricate(store, "plain").start()
    assert "from all text alike" in cairn("report", "plain").out
    assert json.loads(cairn("explain", "plain", "--json").out)["mixture"] == []


def test_held_out_files_of_their_own_are_measured_by_no_share(cairn: Cairn, tmp_path: Path) -> None:
    told = plan(cairn, tmp_path, 'sources = ["web.txt"]\nval_sources = ["held.txt"]')
    assert "3,400 bytes to train on, 3,400 held out" in told and "warning" not in told
