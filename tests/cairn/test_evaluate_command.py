"""`cairn evaluate` on a real, small checkpoint: measured once, beside others, under files of one's own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.model.training.train_state import TrainState
from cairn.storage.checkpoints.checkpoint import checkpoint_target, commit_checkpoint, stage_checkpoint
from cairn.storage.logs.log_entry import this_writer
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.data.snapshot_build import build_snapshot
from cairn.tasks.trainer.tensor_exchange import to_group
from tests import entries
from tests.commands import run_here
from tests.processes.fork_server import fork_server
from tests.storage.builders import trainer_document

pytestmark = pytest.mark.xdist_group("evaluate-verb")  # its run is made once for all its tests

DOCUMENT: dict[str, Any] = {
    "data": {"sources": ["text.txt"], "tokenizer": "bytes"},
    "model": {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8},
    "training": {
        "steps": 20,
        "global_batch": 2,
        "device": "cpu",
        "threads": 1,
        "precision": "fp32",
        "kernels": "stock",
    },
    "evaluation": {"batches": 1, "batch_size": 2, "sample_tokens": 4},
}
Evaluate = Callable[..., tuple[int, str]]


def configured(folder: Path) -> RunConfig:
    return parse_configuration(DOCUMENT, overrides=(), environment={}, name="test", folder=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run of two commits, and suite files."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "text.txt").write_text("\n\n".join(f"paragraph {number} of the text" for number in range(90)))
    (folder / "count.py").write_text("import os, sys; print('{\"files\": %d}' % len(os.listdir(sys.argv[1])))")
    (folder / "count.toml").write_text(
        'batches = 1\nbatch_size = 2\nsample_tokens = 4\n[[evaluators]]\nname = "count"\ncommand = "python count.py"\n'
    )
    (folder / "broken.toml").write_text(
        "batches = 1\nbatch_size = 2\nsample_tokens = 4\n"
        '[[evaluators]]\nname = "broken"\ncommand = ["python", "-c", "raise SystemExit(\'nothing works\')"]\n'
    )
    train(folder, configured(folder))
    return folder


def train(folder: Path, config: RunConfig) -> None:
    """Open a run and commit two checkpoints of weights as they were drawn."""
    store = LocalStore(folder / "store")
    snapshot = build_snapshot(store, config.data, folder)
    log, frozen = RunLog(store, "bard"), config.frozen_sha256()
    opened = entries.opened(
        "bard",
        model_family=config.model_family or "gpt2-tiny",
        config=config.frozen(),
        config_sha256=frozen,
        data_snapshot=snapshot.snapshot_id,
        total_steps=20,
        code_version="0",
    )
    placement = entries.placement(host="x")
    started = entries.started(
        1,
        placement=placement,
        config=config.document(),
        config_sha256=frozen,
        code_version="0",
        micro_batch=1,
    )
    for body in (opened, started):
        log.append(lambda state, body=body: body, writer=this_writer())  # type: ignore[misc]
    for step in (10, 20):
        training = config.training.model_copy(update={"seed": step})
        state = TrainState.create(config.model, training, snapshot.manifest.vocab_size, torch.device("cpu"))
        staged = stage_checkpoint(
            store,
            target=checkpoint_target("bard", step=step, attempt=1),
            groups=(to_group("weights", state.named_tensors()),),
            trainer=trainer_document(step),
        )
        commit_checkpoint(log, staged, writer=this_writer(attempt=1), tokens=1, gpu_seconds=1.0)


@pytest.fixture(scope="module")
def evaluate(folder: Path) -> Evaluate:
    """The command, from the folder: exit code, and stdout or else stderr; evaluators are forked with torch imported."""

    def run(*arguments: str) -> tuple[int, str]:
        with fork_server().forking():
            ended = run_here(("evaluate", *arguments), folder, {})
        return ended.code, ended.out or ended.err

    return run


@pytest.fixture(scope="module")
def measured(evaluate: Evaluate) -> dict[str, Any]:
    """Step 10 under the run's own suite, then step 20 under a file that adds an evaluator."""
    assert evaluate("bard@10")[0] == 0
    code, printed = evaluate("bard@20", "--suite", "count.toml", "--json")
    assert code == 0, printed
    found: dict[str, Any] = json.loads(printed)
    return found


def evaluated_under(folder: Path) -> list[tuple[int, str]]:
    state = RunLog(LocalStore(folder / "store"), "bard").refresh()
    return [(item.step, item.suite) for item in state.evaluations]


def test_every_suite_of_the_file_is_measured(measured: dict[str, Any]) -> None:
    mine = {row["evaluation"]["suite"]: row["evaluation"] for row in measured["rows"] if row["role"] == "this"}
    assert (measured["run_id"], measured["step"], measured["status"]) == ("bard", 20, "recorded")
    assert set(mine) == {"held-out", "count"} and mine["count"]["metrics"] == {"files": 6.0}
    assert {"val_loss", "perplexity", "bits_per_byte"} <= set(mine["held-out"]["metrics"])


def test_earlier_evaluations_under_the_same_suite_stand_beside_it(measured: dict[str, Any]) -> None:
    rows = [(row["role"], row["evaluation"]["step"], row["evaluation"]["suite"]) for row in measured["rows"]]
    assert rows == [("this", 20, "held-out"), ("earlier", 10, "held-out"), ("this", 20, "count")]


@pytest.mark.usefixtures("measured")
def test_what_is_on_record_is_not_measured_again_unless_asked(evaluate: Evaluate, folder: Path) -> None:
    before = evaluated_under(folder)
    assert evaluate("bard@10")[0] == 0
    assert evaluated_under(folder) == before
    code, table = evaluate("bard@10", "--again")
    assert (code, evaluated_under(folder)) == (0, [*before, (10, "held-out")])
    assert "this" in table and "bard@20" in table


@pytest.mark.usefixtures("measured")
def test_an_evaluator_that_fails_is_exit_1_and_on_record(evaluate: Evaluate, folder: Path) -> None:
    code, printed = evaluate("bard@20", "--suite", "broken.toml", "--json")
    row = json.loads(printed)["rows"][-1]["evaluation"]
    assert (code, row["status"]) == (1, "failed") and "nothing works" in row["detail"]
    failed = RunLog(LocalStore(folder / "store"), "bard").refresh().failed_evaluations
    assert {item.suite for item in failed} == {"broken"} and len(failed) == 2, "once, and one retry"


def test_a_suite_file_that_is_not_there_is_a_usage_error(evaluate: Evaluate) -> None:
    code, printed = evaluate("bard", "--suite", "nowhere.toml")
    assert code == 2 and "nowhere.toml: no such suite file" in printed
