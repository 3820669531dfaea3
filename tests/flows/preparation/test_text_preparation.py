"""Text that is prepared while Prefect is imported, and what is said of a tokenizer before a run begins."""

import json
from pathlib import Path

import pytest

from cairn.flows.preparation import preflight
from cairn.flows.preparation.training_request import ResolvedRequest, TrainingRequest, resolve_request
from cairn.model.estimates.numerics import MachineSpeed
from cairn.storage.snapshots.data_snapshot import list_snapshots
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.snapshot_build import build_snapshot
from tests.cairn.command_folder import CONFIGURATION, TEXT
from tests.commands import run_here
from tests.tasks.corpus_files import shaped
from tests.tasks.tokenizer_kinds import PARAGRAPHS, learned, wordlevel
from tests.wiring.flow_in_process import FlowWorld


@pytest.fixture
def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResolvedRequest:
    (tmp_path / "run.toml").write_text(CONFIGURATION)
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    request = TrainingRequest(config=str(tmp_path / "run.toml"), store=str(tmp_path / "store"))
    return resolve_request(request, {})


def snapshots_after(resolved: ResolvedRequest, folder: Path) -> list[str]:
    assert resolved.configuration is not None

    def ask() -> MachineSpeed | None:
        raise AssertionError("these numerics need no measurement")

    with preflight.preparing_text(resolved, resolved.configuration, resolved.open_log(), ask):
        pass
    return list(list_snapshots(LocalStore(folder / "store")))


def test_the_snapshot_of_a_small_text_is_built_as_the_run_builds_it(
    resolved: ResolvedRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_SMALL_BYTES", len(TEXT.encode()))
    (prepared,) = snapshots_after(resolved, tmp_path)
    assert resolved.configuration is not None
    built = build_snapshot(LocalStore(tmp_path / "elsewhere"), resolved.configuration.data, tmp_path)
    assert built.snapshot_id == prepared


def test_much_text_is_left_to_the_run(
    resolved: ResolvedRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_SMALL_BYTES", len(TEXT.encode()) - 1)
    assert snapshots_after(resolved, tmp_path) == []


def test_a_text_that_is_gone_is_left_to_the_run(resolved: ResolvedRequest, tmp_path: Path) -> None:
    (tmp_path / "text.txt").unlink()
    assert snapshots_after(resolved, tmp_path) == []


OWN_TOKENIZER = """
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
    (world.folder / "run.toml").write_text(OWN_TOKENIZER)
    told = run_here(("train", "run.toml", "--dry-run", "--store", "store"), world.folder, {})
    assert LINE in " ".join(told.out.split()), told.err


def test_a_dry_run_refuses_text_that_the_tokenizer_does_not_know_in_the_words_of_the_run(world: FlowWorld) -> None:
    (world.folder / "words.json").write_text(json.dumps(wordlevel()), encoding="utf-8")
    (world.folder / "a.jsonl").write_bytes(shaped([*PARAGRAPHS, *["\N{MOUNTAIN}" * 40] * 9], "jsonl"))
    (world.folder / "run.toml").write_text(OWN_TOKENIZER.replace("t.json", "words.json"))
    told = run_here(("train", "run.toml", "--dry-run", "--store", "store"), world.folder, {})
    opening = world.opened('data.sources=["a.jsonl"]', "data.tokenizer=words.json")
    with pytest.raises(InvalidCorpus, match="does not know 1,080 of") as refusal, opening:
        pass
    assert (told.code, told.err) == (2, f"cairn: {refusal.value}\n")
