"""What a tokenizer.json asks for and is not done is said by the command that opens a run, and by its dry run."""

import json
from pathlib import Path

import pytest

from tests.commands import run_here
from tests.tasks.corpus_files import shaped
from tests.tasks.tokenizer_kinds import PARAGRAPHS, learned
from tests.wiring.flow_in_process import FlowWorld

LINE = "tokenizer: dropout = 0.1 turned off, so that each document has one encoding, all of it"


@pytest.fixture
def world(tmp_path: Path) -> FlowWorld:
    made = learned()
    dropping = {**made, "model": {**made["model"], "dropout": 0.1}}
    (tmp_path / "t.json").write_text(json.dumps(dropping), encoding="utf-8")
    (tmp_path / "a.jsonl").write_bytes(shaped(PARAGRAPHS, "jsonl"))
    return FlowWorld(tmp_path)


def test_a_new_run_says_that_dropout_is_off(world: FlowWorld, capsys: pytest.CaptureFixture[str]) -> None:
    with world.opened('data.sources=["a.jsonl"]', "data.tokenizer=t.json"):
        assert LINE in " ".join(capsys.readouterr().err.split())


def test_a_dry_run_says_that_dropout_is_off(world: FlowWorld) -> None:
    config = world.folder / "run.toml"
    config.write_text(
        '[data]\nsources = ["a.jsonl"]\ntokenizer = "t.json"\n[model]\nblock_size = 8\n[training]\nsteps = 2\n'
    )
    told = run_here(("train", "run.toml", "--dry-run", "--store", "store"), world.folder, {})
    assert LINE in " ".join(told.out.split()), told.err
