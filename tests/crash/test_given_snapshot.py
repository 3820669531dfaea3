"""The real command on tokens another trainer wrote: imported, trained on, and asked for once more."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from cairn.storage.logs.run_entries import RunOpened
from tests.crash.training_command import Command
from tests.processes.waiting import patience_seconds

CONFIG = """
[data]
sources = ["snapshot:{beginning}"]
[model]
n_layer = 1
n_head = 1
n_embd = 8
block_size = 16
[training]
steps = 6
global_batch = 4
threads = 1
probe_every_steps = 3
probe_batches = 1
sample_tokens = 4
[checkpoint]
every_steps = 3
[evaluation]
batches = 1
sample_tokens = 4
"""


@pytest.fixture
def imported(command: Command) -> str:
    """The id of a snapshot of ids whose tokenizer nobody has."""
    numbers = np.random.default_rng(7)
    for name in ("train", "val"):
        numbers.integers(0, 90, 600).astype("<u2").tofile(command.folder / f"{name}.bin")
    arguments = ("--train", "train.bin", "--val", "val.bin", "--vocab-size", "100", "--json")
    assert command.start_verb("import-tokens", *arguments).wait(timeout=patience_seconds()) == 0, command.output()
    return str(json.loads(command.output())["snapshot_id"])


def opened(command: Command) -> RunOpened:
    entry = command.state().opened
    assert entry is not None
    return entry


@pytest.mark.slow
def test_an_imported_snapshot_is_trained_on_and_the_run_keeps_its_whole_id(command: Command, imported: str) -> None:
    (command.folder / "run.toml").write_text(CONFIG.format(beginning=imported[:8]))
    command.train()
    assert opened(command).data_snapshot == imported and command.state_sha256()
    other = f"{imported[:63]}{'0' if imported[63] != '0' else '1'}"
    shutil.copytree(_folder(command, imported), _folder(command, other))
    command.train()  # the beginning is ambiguous now; a run that exists never asks again
    assert opened(command).data_snapshot == imported


def _folder(command: Command, snapshot_id: str) -> Path:
    return command.folder / "store" / "data" / snapshot_id
