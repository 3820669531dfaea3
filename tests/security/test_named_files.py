"""Files that a configuration, a command line or a variable names: nothing but regular ones, up to a size, is read."""

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from cairn.flows.orchestrator.prefect_settings import settle_prefect
from cairn.model.architectures.gpt import GPT
from cairn.model.architectures.hugging_face import to_hugging_face
from cairn.model.configuration.network import ModelConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.model.errors import ModelError
from cairn.operations.trained_models import read_prompt
from cairn.reports.queries.run_simulation import simulate_policies
from cairn.reports.queries.simulation_options import SimulationOptions
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import describe_file
from cairn.tasks.attempt.preemption_notice import kubernetes_reason, read_notice_file
from cairn.tasks.configuration.configuration_source import read_configuration, resolve_evaluation
from cairn.tasks.configuration.settings import EvaluationConfig
from cairn.tasks.data.foreign_tokenizer import read_tokenizer
from cairn.tasks.data.token_files import inspect_token_file
from cairn.tasks.errors import TaskError
from cairn.tasks.trainer.initial_weights import InitialDirectory, keep_initial_weights
from cairn.ui.local_server import read_access
from tests.tasks.corpus_files import open_sources

SMALL = ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8)
GPT2 = {"model_type": "gpt2", "vocab_size": 257, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
MEMORY_BYTES, SECONDS = 1 << 30, 20.0


def weights_from(path: Path) -> None:
    folder = path.parent
    if path.name != "config.json":
        (folder / "config.json").write_text(json.dumps(GPT2))
    if path.name == "shard.safetensors":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": path.name}}))
    elif path.name != "model.safetensors.index.json" and path.name != "model.safetensors":
        network = GPT(SMALL, 257)
        arrays = {name: parameter.detach().numpy() for name, parameter in network.named_parameters()}
        save_file(to_hugging_face(arrays, SMALL, 257), folder / "model.safetensors")
    if path.name != "tokenizer.json":
        (folder / "tokenizer.json").write_text(Tokenizer.bytes().json, encoding="utf-8")
    text = Tokenizer.bytes().json
    directory = InitialDirectory(str(folder), folder)
    keep_initial_weights(LocalStore(folder / "store"), directory, SMALL, tokenizer_json=text, vocab_size=257)


def index_of_tokens(path: Path) -> None:
    (path.parent / "tokens.bin").write_bytes(bytes(8))
    inspect_token_file(path.parent / "tokens.bin")


def trace(path: Path) -> None:
    simulate_policies(SimulationOptions(trace=str(path), devices=1), state=None, environment={})


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a configuration": ("run.toml", lambda path: read_configuration(str(path), overrides=(), environment={})),
    "a suite": ("suite.toml", lambda path: resolve_evaluation(EvaluationConfig(suite=str(path)), path.parent)),
    "init_from, its configuration": ("config.json", weights_from),
    "init_from, its weights": ("model.safetensors", weights_from),
    "init_from, its index": ("model.safetensors.index.json", weights_from),
    "init_from, a shard": ("shard.safetensors", weights_from),
    "init_from, its tokenizer": ("tokenizer.json", weights_from),
    "init_from, its ends": ("generation_config.json", weights_from),
    "init_from, its marks": ("tokenizer_config.json", weights_from),
    "init_from, its special tokens": ("special_tokens_map.json", weights_from),
    "init_from, its chat template": ("chat_template.jinja", weights_from),
    "data.tokenizer": ("tokenizer.json", read_tokenizer),
    "data.sources": ("text.txt", lambda path: open_sources([str(path)], path.parent)),
    "tokens": ("tokens.bin", inspect_token_file),
    "tokens, their index": ("tokens.idx", index_of_tokens),
    "a file of an evaluator, or an exported one": ("script.py", describe_file),
    "--prompt-file": ("prompt.txt", lambda path: read_prompt("", str(path), BytesIO())),
    "--metrics-token-file": ("token", lambda path: read_access(str(path))),
    "--trace": ("trace.toml", trace),
}
STREAMED = {"data.sources", "tokens", "tokens, their index", "a file of an evaluator, or an exported one"}


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


SHAPES: dict[str, Callable[[Path], object]] = {
    "a link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to another": lambda path: path.symlink_to("/dev/urandom"),
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "too large": large,
}
CASES = [(reader, shape) for reader in READERS for shape in SHAPES if not (reader in STREAMED and shape == "too large")]


@pytest.fixture
def bounded() -> Iterator[None]:
    """This process cannot take much more memory, and what waits is ended."""

    def end(signum: int, frame: object) -> None:
        raise AssertionError("it waits")

    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, end)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.linux
@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(("reader", "shape"), CASES)
def test_a_file_that_is_none_or_too_large_is_refused_in_words(tmp_path: Path, reader: str, shape: str) -> None:
    name, read = READERS[reader]
    SHAPES[shape](tmp_path / name)
    with pytest.raises((TaskError, ModelError, OSError)) as refused:
        read(tmp_path / name)
    said = str(refused.value)
    assert name in said and len(said) < 600, said


@pytest.mark.linux
@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_notice_file_of_any_kind_is_a_notice(tmp_path: Path, shape: str) -> None:
    SHAPES[shape](tmp_path / "notice")
    notice = read_notice_file(str(tmp_path / "notice"))
    assert notice is not None and len(notice.detail) < 600


@pytest.mark.linux
@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_that_a_variable_names_is_left_out(tmp_path: Path, shape: str) -> None:
    SHAPES[shape](tmp_path / "named")
    assert kubernetes_reason({"CAIRN_ENDED_PODS": str(tmp_path / "named")}, "host") == ""
    said = list[str]()
    settle_prefect({"CAIRN_CACHE": str(tmp_path), "PREFECT_PROFILES_PATH": str(tmp_path / "named")}, say=said.append)
    assert len(said) == 1
