"""docs/one_file.py, which imports nothing of Cairn, trains what `cairn train` does: equal bits and numbers."""

import ast
import importlib.util
import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from cairn.model.configuration.training import auto_micro_batch
from cairn.storage.logs.step_log import StepRecord, read_step_records
from cairn.tasks.configuration.configuration_source import parse_configuration
from tests.commands import ROOT
from tests.crash.training_command import ARCHITECTURES, RUN, Command
from tests.documented_commands import documented_configurations
from tests.processes.fork_server import fork_server
from tests.text.shakespeare import TINY_SHAKESPEARE

ONE_FILE = ROOT / "docs" / "one_file.py"
MOST_LINES = 300
STEPS = (2, 4, 6)
SETTINGS = ("n_layer=2", "n_head=2", "n_embd=16", "block_size=16", "steps=6", "global_batch=10", "micro_batch=2")
CONFIGURATION = """
[data]
sources = ["first.txt", "second.txt"]
tokenizer = "bytes"
[model]
architecture = "{architecture}"
n_layer = 2
n_head = 2
n_embd = 16
block_size = 16
[training]
steps = 6
global_batch = 10
micro_batch = 2
lr = 3e-3
warmup_steps = 0
precision = "fp32"
kernels = "stock"
device = "cpu"
probe_every_steps = 2
sample_tokens = 0
[checkpoint]
every_steps = 2
[evaluation]
every_commits = 3
sample_tokens = 0
"""

pytestmark = pytest.mark.xdist_group("one-file")  # its runs are made once for all its tests


@dataclass(frozen=True, kw_only=True, slots=True)
class Witness:
    """The folder in which both have trained: `cairn train`'s command, and the lines of the one file's log."""

    command: Command
    architecture: str
    lines: tuple[dict[str, float | str], ...]
    said: str

    def of_cairn(self) -> list[StepRecord]:
        """Return the steps that `cairn train` has on record."""
        return list(read_step_records(self.command.store, f"runs/{RUN}", self.command.state().attempts))


def one_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file", ONE_FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_texts(folder: Path) -> list[str]:
    """Write two texts: less than a step's windows, so that epochs change, and held out from within a character on."""
    first, second = TINY_SHAKESPEARE.read_text(encoding="utf-8")[:700], "x" + "é" * 200
    (folder / "first.txt").write_text(first, encoding="utf-8")
    (folder / "second.txt").write_text(second, encoding="utf-8")
    content = second.encode()
    assert content[int(len(content) * 0.9)] & 0xC0 == 0x80
    return ["first.txt", "second.txt"]


ALSO = [pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES[1:]]  # quick witness: the first


@pytest.fixture(scope="module", params=[ARCHITECTURES[0], *ALSO])
def witness(request: pytest.FixtureRequest, api_url: str, tmp_path_factory: pytest.TempPathFactory) -> Witness:
    """Both have trained one configuration to step 6."""
    folder = tmp_path_factory.mktemp("one-file")
    texts, command = write_texts(folder), Command(folder, api_url)
    (folder / "run.toml").write_text(CONFIGURATION.format(architecture=request.param), encoding="utf-8")
    command.train()
    said = train_in(folder, *texts, f"architecture={request.param}", *SETTINGS, "every_steps=2")
    lines = (folder / "one-file.jsonl").read_text(encoding="utf-8").splitlines()
    return Witness(command=command, architecture=request.param, lines=tuple(map(json.loads, lines)), said=said)


def train_in(folder: Path, *arguments: str) -> str:
    """Run the file in a process of its own, in a folder; returns what it printed.

    In this process other tests may have settled how its libraries compute.
    """
    words = [sys.executable, "-m", "tests.crash.one_file_process", str(ONE_FILE), *arguments]
    with fork_server().forking():
        return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_three_checkpoints_have_the_bits_of_the_one_file(witness: Witness) -> None:
    committed = {item.committed.step: item.committed.state_sha256 for item in witness.command.state().checkpoints}
    assert {line["step"]: line["state_sha256"] for line in witness.lines if "state_sha256" in line} == committed
    assert tuple(committed) == STEPS


def test_every_step_has_the_numbers_of_the_one_file(witness: Witness) -> None:
    names = ("step", "train_loss", "lr", "grad_norm", "probe_loss")
    steps = [tuple(getattr(record, name) for name in names) for record in witness.of_cairn()]
    assert [tuple(line.get(name) for name in names) for line in witness.lines] == steps


def test_the_evaluation_measures_the_loss_of_the_one_file(witness: Witness) -> None:
    (evaluation,) = witness.command.state().evaluations
    assert f"held-out loss {evaluation.metrics['val_loss']:.4f}" in witness.said


def test_the_one_file_goes_on_from_its_checkpoint_with_the_same_bits(witness: Witness, tmp_path: Path) -> None:
    texts = write_texts(tmp_path)
    checkpoint = witness.command.folder / "one-file-4.safetensors"
    train_in(tmp_path, *texts, f"architecture={witness.architecture}", *SETTINGS, f"resume={checkpoint}")
    lines = [json.loads(line) for line in (tmp_path / "one-file.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [5, 6] and lines[-1]["state_sha256"] == witness.lines[-1]["state_sha256"]


def test_the_one_file_has_the_tutorials_configuration() -> None:
    (shown,) = documented_configurations((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))
    tutorial = parse_configuration(tomllib.loads(shown), overrides=(), environment={}, name="tutorial.md", folder=ROOT)
    training, found = tutorial.training, one_file().Config()
    for section in (tutorial.model, training, tutorial.data):
        for name in type(section).model_fields.keys() & vars(found).keys() - {"micro_batch"}:
            assert getattr(section, name) == getattr(found, name), name
    assert (training.device, training.precision, training.kernels) == ("cpu", "fp32", "stock")
    assert found.every_steps == tutorial.checkpoint.every_steps == training.probe_every_steps
    assert found.micro_batch == auto_micro_batch(training.global_batch, tutorial.model.block_size, on_cpu=True)


def test_the_one_file_imports_nothing_but_the_standard_library_torch_and_safetensors() -> None:
    tree = ast.parse(ONE_FILE.read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} == {
        *("dataclasses", "hashlib", "json", "math", "pathlib", "struct", "sys"),
        *("safetensors", "torch"),
    }


def test_the_one_file_is_read_in_an_hour() -> None:
    assert len(ONE_FILE.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
