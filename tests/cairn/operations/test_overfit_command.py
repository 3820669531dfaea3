"""`cairn train --overfit-one-batch`: what can learn a batch by heart is sound, what cannot is told where to look."""

import json
from pathlib import Path

import pytest

from cairn.operations.unrecorded_training import judge_losses
from tests.commands import Cairn

TEXT = "\n".join(
    f"line {number}: the quick brown fox jumps over {number * 7919 % 1013} lazy dogs" for number in range(99)
)
RUN = """
[data]
sources = ["text.txt"]
tokenizer = "bytes"
[model]
n_layer = 1
n_head = 2
n_embd = 32
block_size = 8
dropout = 0.5
[training]
steps = 100000
lr = 2e-2
threads = 1
precision = "fp32"
kernels = "stock"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def test_a_network_that_learns_the_batch_is_sound_and_nothing_is_written(folder: Path, cairn: Cairn) -> None:
    ended = cairn("train", "run.toml", "--overfit-one-batch", "--json")
    found = json.loads(ended.out)
    assert (ended.code, found["sound"], found["tokens"]) == (0, True, 32)
    assert found["losses"][0] > 4 and found["losses"][-1] < 0.1 and len(found["losses"]) < 300
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["run.toml", "text.txt"]


def test_the_batch_is_of_the_text_however_it_is_read(folder: Path, cairn: Cairn) -> None:
    lines = "\n".join(json.dumps({"body": line}) for line in TEXT.splitlines())
    for name in ("lines", "held"):
        (folder / name).write_text(lines)
    settings = (
        *('data.sources=["lines"]', "data.format=jsonl", "data.text_field=body", 'data.val_sources=["held"]'),
        *("data.weights=[1]", "data.stages=[{step = 9, weights = [1]}]", 'data.exclude=["b*"]', "data.separator=---"),
    )
    options = (part for setting in settings for part in ("--set", setting))
    ended = cairn("train", "run.toml", "--overfit-one-batch", *options)
    assert (ended.code, ended.out[:6]) == (0, "sound:")


def test_a_network_that_does_not_is_told_what_to_look_at_by_exit_code_1(folder: Path, cairn: Cairn) -> None:
    ended = cairn("train", "run.toml", "--overfit-one-batch", "--set", "training.lr=1e30")
    assert ended.code == 1
    assert ended.out.startswith("NOT SOUND: step ") and "lower training.lr (now 1e+30)" in ended.out


def test_a_mistake_in_the_configuration_is_refused_before_anything_is_trained(folder: Path, cairn: Cairn) -> None:
    ended = cairn("train", "run.toml", "--overfit-one-batch", "--set", "model.n_head=3")
    assert (ended.code, ended.out) == (2, "")


@pytest.mark.parametrize(
    ("losses", "problem", "sound", "words"),
    [
        ([5.0, 1.0, 0.09], "", True, "known by heart"),
        ([5.0, 4.9, 4.8], "", False, "too slow or too small; raise training.lr (now 0.5)"),
        ([5.0, 6.0, 9.0], "", False, "it jumps; lower training.lr (now 0.5)"),
        ([5.0, 0.2, 3.0], "", False, "was 0.200 in between: it jumps"),
        ([5.0], "step 2: the loss is not finite", False, "step 2: the loss is not finite: lower training.lr"),
    ],
)
def test_the_verdict_follows_from_the_losses(losses: list[float], problem: str, sound: bool, words: str) -> None:
    is_sound, why = judge_losses(losses, problem, lr=0.5)
    assert is_sound is sound and words in why
