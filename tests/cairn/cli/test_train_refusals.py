"""Text and settings that a start refuses: before anything is started, and in `cairn data CONFIG`.

A mistake that is a line typed in a folder is in `test_command_lines`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cairn.flows.orchestrator import session_server
from cairn.model.configuration.data import DataConfig
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data import source_files
from cairn.tasks.data.snapshot_build import build_snapshot
from tests.cairn.command_folder import CONFIGURATION, TEXT
from tests.commands import ROOT, Cairn, Ended
from tests.fabricated_run import FabricatedRun
from tests.tasks.corpus_files import shaped
from tests.tasks.tokenizer_kinds import PARAGRAPHS, unigram

Train = Callable[..., Ended]


@pytest.fixture
def train(tmp_path: Path, cairn: Cairn) -> Train:
    (tmp_path / "run.toml").write_text(CONFIGURATION)
    (tmp_path / "text.txt").write_text(TEXT)
    # Nobody listens there: a command that went as far as the orchestrator would not end with 2.
    return lambda *arguments: cairn("train", "run.toml", *arguments, PREFECT_API_URL="http://127.0.0.1:9/api")


@pytest.mark.parametrize(
    "override",
    ["model.block_size=5000", "data.tokenizer=bpe:60000", "model.n_embd=1048576", "model.vocab_size=100"],
)
def test_what_the_text_or_the_memory_refuses_is_refused_before_a_server_is_started(
    train: Train, cairn: Cairn, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(session_server, "TemporaryServer")
    assert cairn("train", "run.toml", "--set", override, PREFECT_API_URL="").code == 2


def test_a_weighted_source_with_too_little_text_is_named(train: Train, tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text("abc")
    ended = train("--set", 'data.sources=["text.txt", "small.txt"]', "--set", "data.weights=[3, 1]")
    assert ended.code == 2 and "data.sources = 'small.txt': " in ended.err
    assert "no window of its own; rule: with data.weights every source fills one" in ended.err


def snapshot_config(source: str) -> str:
    return CONFIGURATION.replace('tokenizer = "bytes"\n', "").replace("text.txt", source)


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (snapshot_config("snapshot:0123abcd"), ("no such snapshot in ", "cairn import-tokens")),
        (
            CONFIGURATION.replace("text.txt", "snapshot:0123abcd"),
            ("tokenizer: decided by 'snapshot:0123abcd' already",),
        ),
    ],
    ids=["one that is not there, with what to do", "one beside a tokenizer, by name"],
)
def test_a_snapshot_is_refused(train: Train, tmp_path: Path, configuration: str, words: tuple[str, ...]) -> None:
    (tmp_path / "run.toml").write_text(configuration)
    ended = train()
    assert ended.code == 2 and [word for word in words if word not in ended.err] == []


def test_a_block_longer_than_a_split_of_the_snapshot_is_refused(train: Train, cairn: Cairn, tmp_path: Path) -> None:
    for name, first in (("train", 0), ("val", 100)):
        np.arange(first, first + 100, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    made = cairn("import-tokens", "--train", "train.bin", "--val", "val.bin", "--vocab-size", "300", "--json")
    (tmp_path / "run.toml").write_text(snapshot_config(f"snapshot:{json.loads(made.out)['snapshot_id']}"))
    ended = train("--set", "model.block_size=100")
    assert ended.code == 2 and "model.block_size = 100: the " in ended.err


def test_a_store_that_cannot_be_written_is_named(train: Train, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    ended = train()
    assert ended.code == 2 and str(tmp_path / "store") in ended.err and "cannot be written" in ended.err


def test_processes_that_cannot_share_the_runs_micro_batches_are_refused_with_those_that_can(
    bard: FabricatedRun, cairn: Cairn
) -> None:
    ended = cairn("train", "--run-id", "bard", "--set", "training.processes=2")
    assert ended.code == 2 and "2 processes cannot share 1 micro-batch (global_batch=2, micro_batch=2)" in ended.err
    assert "processes that can: 1. Use as many" in ended.err


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        pytest.param(signal.SIGTERM, 75, "preempted", id="SIGTERM"),
        pytest.param(signal.SIGINT, 130, "interrupted", id="Ctrl-C", marks=pytest.mark.slow),  # quick witness: SIGTERM
    ],
)
def test_a_notice_before_the_flow_begins_leaves_at_once_and_resumable(
    tmp_path: Path, number: signal.Signals, code: int, words: str
) -> None:
    (tmp_path / "run.toml").write_text(CONFIGURATION)
    (tmp_path / "text.txt").write_text(TEXT)
    command = [sys.executable, "-m", "cairn.cli.command", "train", "run.toml", "--store", "store"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    process.stderr.readline()  # it has begun
    process.send_signal(number)
    rest = process.communicate(timeout=240)[1]
    assert (process.returncode, words in rest, "Traceback" in rest) == (code, True, False)


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
