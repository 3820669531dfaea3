"""`training.init_from` through the command: refused before the orchestrator, or kept at run-opened."""

import json
import shutil
from pathlib import Path

import pytest

from cairn.storage.logs.log_entry import decode_entry
from cairn.storage.logs.run_entries import RUN_KINDS, RunOpened
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from tests.commands import Cairn
from tests.tasks.committed_model import commit_model, small_configuration

CONFIG = """
[data]
sources = ["text.jsonl"]
val_fraction = 0.3
[training]
steps = 4
global_batch = 2
threads = 1
device = "cpu"
init_from = "out"
probe_every_steps = 0
"""
NOWHERE = "http://127.0.0.1:9/api"


@pytest.fixture
def exported(cairn: Cairn, store: LocalStore, tmp_path: Path) -> Path:
    """A model in `here/out`, beside a configuration that begins from it; the command itself runs one folder above."""
    (tmp_path / "here").mkdir()
    commit_model(store, tmp_path / "here", small_configuration())
    assert cairn("export", "bard", "here/out").code == 0
    (tmp_path / "here" / "run.toml").write_text(CONFIG)
    return tmp_path / "here"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.init_from=gone", ("training.init_from = 'gone'", "config.json cannot be read", "rule")),
        (
            "training.init_from=ftp://host/gpt2",
            ("training.init_from = 'ftp://host/gpt2': ftp:// is not read", "rule: a path, or a URL"),
        ),
        ("model.vocab_size=300", ("model.vocab_size = 300", "use model.vocab_size = 301")),
        ("model.n_layer=3", ("training.init_from = 'out'", "model.n_layer = 3", "use model.n_layer = 2")),
        ("model.block_size=32", ("model.block_size = 32", "16 positions", "use model.block_size = 16 or less")),
        ("data.tokenizer=bytes", ("has 257 ids, the weights have 301", "use data.tokenizer = 'out/tokenizer.json'")),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_started(
    cairn: Cairn, exported: Path, override: str, words: tuple[str, ...]
) -> None:
    ended = cairn("train", "here/run.toml", "--set", override, PREFECT_API_URL=NOWHERE)
    assert ended.code == 2 and [word for word in words if word not in ended.err] == []


def test_a_run_opened_before_the_key_existed_reads_as_ever(store: LocalStore) -> None:
    body = {"run_id": "r", "model_family": "f", "config": {}, "config_sha256": "c", "data_snapshot": "d"}
    entry = {
        "version": 1, "seq": 0, "kind": "run-opened", "at": "2026-01-01T00:00:00Z", "write_id": "w", "prev": None,
        "writer": {"host": "h", "pid": 1}, "resume": [], "body": {**body, "total_steps": 1, "code_version": "0"},
    }  # fmt: skip
    opened = decode_entry(json.dumps(entry).encode(), RUN_KINDS, where="here").body
    assert isinstance(opened, RunOpened) and opened.initial_weights_sha256 is None


@pytest.mark.slow
def test_a_run_begins_from_the_weights_and_goes_on_without_their_directory(
    cairn_process: Cairn, exported: Path, store: LocalStore
) -> None:
    ended = cairn_process("train", "here/run.toml", "--set", "checkpoint.every_steps=2")
    assert ended.code == 0, ended.err
    state = RunLog(store, "run").refresh()
    assert state.opened is not None and state.finished is not None
    keys = [f"{state.opened.initial_weights_sha256}/weights.safetensors"]
    keys += [f"{state.opened.initial_source_sha256}/source.json"]
    assert store.keys("initial") == sorted(f"initial/{key}" for key in keys)
    shutil.rmtree(exported / "out")
    assert cairn_process("train", "--run-id", "run").code == 0


@pytest.mark.slow
def test_a_configuration_without_the_network_s_keys_goes_on_without_the_directory(
    cairn_process: Cairn, exported: Path, store: LocalStore
) -> None:
    ended = cairn_process("train", "here/run.toml", "--set", "budgets.lost.retries=0", CAIRN_FAULTS="kill@2")
    assert ended.code == 4, ended.err
    shutil.rmtree(exported / "out")
    other = cairn_process("train", "here/run.toml", "--set", "model.n_layer=3")
    assert other.code == 6 and "model.n_layer: run has 2, this command has 3" in other.err
    again = cairn_process("train", "here/run.toml")
    assert again.code == 0, again.err
    state = RunLog(store, "run").refresh()
    assert state.opened is not None and state.finished is not None
    resolved = {"n_layer": 2, "n_head": 2, "n_embd": 12, "block_size": 16, "vocab_size": 301}
    assert {key: state.opened.config["model"][key] for key in resolved} == resolved


@pytest.mark.slow  # quick: test_adapters.py, tests/model/test_same_bits_on_any_number_of_processes.py
def test_adapters_killed_on_two_processes_end_in_the_bits_of_one_are_computed_again_and_are_forked(
    cairn_process: Cairn, exported: Path, store: LocalStore
) -> None:
    settings = ("training.lora.rank=2", "training.micro_batch=1", "checkpoint.every_steps=1", "checkpoint.keep_last=1")
    common = ["train", "here/run.toml", *(word for each in settings for word in ("--set", each))]
    assert cairn_process(*common, "--run-id", "alone").code == 0
    ended = cairn_process(*common, "--run-id", "two", "--set", "training.processes=2", CAIRN_FAULTS="kill@3")
    assert ended.code == 0, ended.err
    shutil.rmtree(exported / "out")
    states = [RunLog(store, run).refresh() for run in ("alone", "two")]
    digests = [state.finished.state_sha256 for state in states if state.finished]
    assert len(digests) == 2 == len(states[1].attempts) and digests[0] == digests[1]
    again = cairn_process("replay", "two")
    assert again.code == 0 and "4 equal" in again.out, again.out  # most of their starts are deleted
    assert cairn_process("fork", "two", "longer", "--set", "training.steps=6").code == 0
    assert cairn_process("train", "--run-id", "longer").code == 0
    assert RunLog(store, "longer").refresh().finished is not None
