"""`cairn data CONFIG`: the text as it would be trained on, and what a start would leave out or refuse."""

import json
from pathlib import Path

import pytest

from cairn.model.configuration.data import DataConfig
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data import source_files
from cairn.tasks.data.snapshot_build import build_snapshot
from tests.commands import Cairn
from tests.tasks.corpus_files import shaped
from tests.tasks.tokenizer_kinds import PARAGRAPHS, unigram


def configure(folder: Path, *data: str) -> None:
    lines = "\n".join(data)
    (folder / "own.toml").write_text(f"[data]\n{lines}\n[training]\nsteps = 1\n")


def test_the_text_of_a_configuration_is_shown_as_it_would_be_trained_on(tmp_path: Path, cairn: Cairn) -> None:
    lines = [json.dumps({"text": f"line {number}"}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"body": "x"}', '{"body": "y"}']))
    (tmp_path / "b.jsonl").write_text("")
    configure(tmp_path, 'sources = ["*.jsonl"]', "max_rejected_fraction = 0.1", "weights = [2]")
    shown = json.loads(cairn("data", "own.toml", "--json").out)
    assert [document["text"] for document in shown["documents"]] == [f"line {number}" for number in range(5)]
    assert {(row["source"], row["kind"], row["documents"]) for row in shown["left_out"]} == {
        ("a.jsonl", "missing-field", 2),
        ("b.jsonl", "empty-file", 1),
    }
    assert "line 41, fields 'body'" in {row["place"] for row in shown["left_out"]}
    assert shown["mixture"] == [{"from_step": 0, "shares": {"*.jsonl": 1.0}}]
    assert shown["refused"] == "" and shown["train_documents"] + shown["val_documents"] == 40


def test_text_that_the_tokenizer_does_not_know_is_counted_before_and_after_the_start(
    tmp_path: Path, store: LocalStore, cairn: Cairn
) -> None:
    (tmp_path / "a.jsonl").write_bytes(shaped([f"{text} \N{SNOWMAN}" for text in PARAGRAPHS], "jsonl"))
    (tmp_path / "t.json").write_text(json.dumps(unigram()))
    more = ('tokenizer = "t.json"', "val_fraction = 0.4", "max_rejected_fraction = 1")
    configure(tmp_path, 'sources = ["a.jsonl"]', *more)
    unknown = 3 * len(PARAGRAPHS)
    data = DataConfig(sources=("a.jsonl",), tokenizer="t.json", val_fraction=0.4, max_rejected_fraction=1.0)
    for shown in ("own.toml", build_snapshot(store, data, tmp_path).snapshot_id):
        assert f"unknown {unknown} bytes of the text to the tokenizer (" in " ".join(cairn("data", shown).out.split())
        assert json.loads(cairn("data", shown, "--json").out)["unknown_bytes"] == unknown


def test_rows_left_out_for_many_reasons_are_found_by_reading_a_file_once_more(
    tmp_path: Path, cairn: Cairn, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = ['{"text": 1}', "no JSON", '{"text": ""}', '{"body": "x"}']
    (tmp_path / "a.jsonl").write_text("\n".join([*(f'{{"text": "line {n}"}}' for n in range(40)), *faults]))
    configure(tmp_path, 'sources = ["a.jsonl"]')
    opened, real = list[str](), source_files.open_file
    monkeypatch.setattr(source_files, "open_file", lambda path: opened.append(path) or real(path))
    shown = json.loads(cairn("data", "own.toml", "--json").out)
    assert [row["place"] for row in sorted(shown["left_out"], key=lambda row: row["place"])] == [
        "line 41, fields 'text'", "line 42", "line 43, fields 'text'", "line 44, fields 'body'",
    ]  # fmt: skip
    assert [item["place"] for item in shown["documents"]] == [f"line {n}, fields 'text'" for n in range(1, 6)]
    assert len(opened) == 5, "recognised, checked, surveyed, the refusal's first row, and all rows that are shown"


def test_a_preview_refuses_a_tokenizer_that_a_start_refuses(tmp_path: Path, cairn: Cairn) -> None:
    (tmp_path / "a.txt").write_text("stone upon stone " * 9)
    configure(tmp_path, 'sources = ["a.txt"]', 'tokenizer = "gone.json"')
    assert "gone.json: No such file" in json.loads(cairn("data", "own.toml", "--json").out)["refused"]


def test_a_preview_says_that_a_start_would_refuse_the_text(tmp_path: Path, cairn: Cairn) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nnonsense\n')
    configure(tmp_path, 'sources = ["a.jsonl"]')
    told = cairn("data", "own.toml").out
    assert "1 of 2 documents cannot be used" in " ".join(told.split()) and "not-json" in told
