"""What a tokenizer.json asks for and is not done is said by the command that opens a run, and by its dry run."""

import json
from pathlib import Path

import pytest

from cairn.tasks.data.document import InvalidCorpus
from tests.commands import run_here
from tests.tasks.corpus_files import shaped
from tests.tasks.tokenizer_kinds import PARAGRAPHS, learned, wordlevel
from tests.wiring.flow_in_process import FlowWorld

CONFIGURATION = """
[data]
sources = ["a.jsonl"]
tokenizer = "t.json"
[model]
block_size = 8
[training]
steps = 2
precision = "fp32"
kernels = "stock"
"""
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
    (world.folder / "run.toml").write_text(CONFIGURATION)
    told = run_here(("train", "run.toml", "--dry-run", "--store", "store"), world.folder, {})
    assert LINE in " ".join(told.out.split()), told.err


def test_a_dry_run_refuses_text_that_the_tokenizer_does_not_know_in_the_words_of_the_run(world: FlowWorld) -> None:
    (world.folder / "words.json").write_text(json.dumps(wordlevel()), encoding="utf-8")
    (world.folder / "a.jsonl").write_bytes(shaped([*PARAGRAPHS, *["\N{MOUNTAIN}" * 40] * 9], "jsonl"))
    (world.folder / "run.toml").write_text(CONFIGURATION.replace("t.json", "words.json"))
    told = run_here(("train", "run.toml", "--dry-run", "--store", "store"), world.folder, {})
    opening = world.opened('data.sources=["a.jsonl"]', "data.tokenizer=words.json")
    with pytest.raises(InvalidCorpus, match="does not know 1,080 of") as refusal, opening:
        pass
    assert (told.code, told.err) == (2, f"cairn: {refusal.value}\n")
