"""What `transformers` itself makes of a directory written here: the same logits, the same ids, the same text."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors import safe_open

from cairn.model.architectures.gpt import GPT
from cairn.model.architectures.hugging_face import check_settings, parse_config, to_hugging_face
from cairn.model.configuration.data import DataConfig
from cairn.model.configuration.network import ModelConfig, parameter_table
from cairn.model.data.tokenizer import Tokenizer
from cairn.model.errors import InvalidInput
from cairn.model.estimates.size_estimate import count_parameters
from cairn.model.inference.prediction import Sampling, generate_stream
from cairn.model.kernels.head_loss import token_loss
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.tasks.data.foreign_tokenizer import parse_tokenizer
from cairn.tasks.data.snapshot_build import build_snapshot
from cairn.tasks.data.token_import import numbered_vocabulary
from cairn.tasks.errors import TaskError
from cairn.tasks.evaluator.checkpoint_model import CheckpointModel, write_model_directory
from cairn.tasks.trainer.initial_weights import (
    InitialDirectory,
    adopt_network,
    keep_initial_weights,
    read_initial_weights,
)
from tests.memory_store import MemoryStore

TEXT = "\n\n".join(f"Zeile {number} über Ünïcode, 東京 and 🪨 stones;\n\tthe {number}th cairn." for number in range(80))
TEXTS = (TEXT[:500], "a\n\n b\r\n\tc  d", "🪨東京 ñ \u200b\x00 end", "one<|endoftext|>two", "", " ")
SHAPE: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 12, "block_size": 32, "dropout": 0.1}
QWEN3 = {"architecture": "qwen3", "n_kv_head": 1, "head_size": 8, "n_inner": 20}
NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2 without bias": {"bias": False, "n_inner": 20},
    "qwen3": QWEN3,
    "qwen3 untied": {**QWEN3, "tied": False},
    "llama without gains": {**QWEN3, "qk_norm": False, "norm_gain": False, "rotary_base": 500.0},
}
pytestmark = [
    pytest.mark.xdist_group("transformers"),  # importing it takes seconds
    pytest.mark.usefixtures("forked_parsers"),
]


def opened(
    folder: Path, *, network: dict[str, Any] | None = None, tokenizer: str = "bpe:301", mask: bool = False
) -> CheckpointModel:
    """A network whose every weight, biases too, is far from where it begins."""
    (folder / "a.txt").write_text(TEXT, encoding="utf-8")
    store = MemoryStore()
    made = build_snapshot(store, DataConfig(sources=("a.txt",), tokenizer=tokenizer, val_fraction=0.3), folder)
    snapshot = open_snapshot(store, made.snapshot_id, folder / "cache")
    made_network = GPT(ModelConfig(**SHAPE, **(network or {})), made.manifest.vocab_size)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in made_network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    if mask:
        made_network.boundary_id = made.manifest.end_of_text_id
    tokens = parse_tokenizer(snapshot.tokenizer_json)
    return CheckpointModel(network=made_network.eval(), tokenizer=tokens, snapshot=snapshot)


@pytest.fixture(scope="module", params=NETWORKS.values(), ids=NETWORKS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CheckpointModel:
    return opened(tmp_path_factory.mktemp("model"), network=request.param)


@pytest.fixture(scope="module")
def folder(model: CheckpointModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    write_model_directory(folder, model, card="# A card\n")
    return folder


@pytest.fixture(scope="module")
def theirs(transformers: ModuleType, folder: Path) -> torch.nn.Module:
    found, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {name: list(keys) for name, keys in report.items() if keys} == {}, "a weight was missing or left over"
    return cast(torch.nn.Module, found.eval())


def test_transformers_computes_the_same_logits(model: CheckpointModel, theirs: torch.nn.Module) -> None:
    ids = torch.tensor([model.tokenizer.encode_batch([TEXT])[0][:64]]).view(2, 32)
    with torch.no_grad():
        ours = model.network(ids)
        assert (theirs(ids).logits - ours).abs().max() < 1e-4 * ours.abs().max()
    assert theirs.dtype == torch.float32 and theirs.config.vocab_size == 301


def test_transformers_computes_the_same_gradients(model: CheckpointModel, theirs: torch.nn.Module) -> None:
    ids = torch.tensor([model.tokenizer.encode_batch([TEXT])[0][:64]]).view(2, 32)
    model.network.zero_grad()
    theirs.zero_grad()
    token_loss(model.network(ids[:, :-1]), ids[:, 1:]).backward()
    token_loss(theirs(ids[:, :-1]).logits, ids[:, 1:]).backward()
    grads = {name: parameter.grad.numpy() for name, parameter in model.network.named_parameters()}  # type: ignore[union-attr]
    wanted = to_hugging_face(grads, model.network.config, model.network.vocab_size)
    own = {name for row in parameter_table(model.network.config, model.network.vocab_size) for name in row.theirs}
    for name, parameter in theirs.named_parameters():
        if name in own:  # not a bias or gain that only they have
            found = parameter.grad.numpy()
            assert np.linalg.norm(found - wanted[name]) < 1e-4 * max(np.linalg.norm(found), 1e-3), name


def test_transformers_generates_the_same_text_greedily(model: CheckpointModel, theirs: torch.nn.Module) -> None:
    prompt = model.tokenizer.encode_batch(["Zeile 5"])[0]
    ours = list(generate_stream(model.network, prompt, new_tokens=20, sampling=Sampling(temperature=0)))
    ended = ours.index(model.tokenizer.end_of_text_id) + 1 if model.tokenizer.end_of_text_id in ours else len(ours)
    found = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    assert found[0, len(prompt) :].tolist() == ours[:ended]


@pytest.mark.parametrize("tokenizer", ["bpe:301", "bytes"])
def test_transformers_reads_text_as_the_same_ids_and_back(
    transformers: ModuleType, tmp_path: Path, tokenizer: str
) -> None:
    model = opened(tmp_path, tokenizer=tokenizer)
    write_model_directory(tmp_path / "out", model, card="")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = model.tokenizer.encode_batch(TEXTS)
    assert [found(text)["input_ids"] for text in TEXTS] == ours
    assert [found.decode(ids) for ids in ours] == [model.tokenizer.decode(ids) for ids in ours]
    end = model.tokenizer.end_of_text_id
    assert (found.eos_token_id, found.bos_token_id, found.unk_token_id, found.model_max_length) == (end, end, end, 32)


def test_a_tokenizer_that_adds_tokens_around_a_text_adds_none_here(transformers: ModuleType, tmp_path: Path) -> None:
    document = json.loads(Tokenizer.bytes().json)
    mark = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [mark, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}},
    }
    (tmp_path / "template.json").write_text(json.dumps(document), encoding="utf-8")
    write_model_directory(tmp_path / "out", opened(tmp_path, tokenizer="template.json"), card="")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("ab")["input_ids"] == [97, 98]


QWEN3_SAVED = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 12} | {
    "head_dim": 6, "intermediate_size": 20, "max_position_embeddings": 16, "tie_word_embeddings": True
}  # fmt: skip
LLAMA_SAVED = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 20} | {
    "max_position_embeddings": 16, "tie_word_embeddings": False
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 24, "rope_theta": 500.0
}  # fmt: skip
SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}),
    "qwen3": ("Qwen3", QWEN3_SAVED),
    "llama": ("Llama", LLAMA_SAVED),
    "smollm2": ("Llama", LLAMA_SAVED | {"num_key_value_heads": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", LLAMA_SAVED | {"rope_parameters": LLAMA3}),
    "linear": ("Llama", LLAMA_SAVED | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
}


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("shard", ["5KB", "1GB"])
def test_what_transformers_saves_begins_a_run_with_its_logits(
    transformers: ModuleType, tmp_path: Path, kind: str, shard: str
) -> None:
    name, settings = SAVED[kind]
    wanted = getattr(transformers, f"{name}Config")(vocab_size=53, bos_token_id=0, eos_token_id=0, **settings)
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    theirs = getattr(transformers, head)(wanted).eval()
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    store, directory = MemoryStore(), InitialDirectory(".", tmp_path)
    config, numbers = adopt_network(directory, ModelConfig()), numbered_vocabulary(53, 0).json
    kept = keep_initial_weights(store, directory, config, tokenizer_json=numbers, vocab_size=53)
    ours, ids = GPT(config, 53).eval(), torch.arange(32).view(2, 16)
    arrays = read_initial_weights(store, kept.weights_sha256)
    ours.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    with torch.no_grad():
        assert torch.allclose(ours(ids), theirs(ids).logits, rtol=0, atol=1e-5)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "5KB")


def test_the_shapes_of_a_published_qwen3_are_known(transformers: ModuleType) -> None:
    """Qwen3-0.6B by its published config.json, without its weights."""
    published = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": True, "use_sliding_window": False,
        "vocab_size": 151936,
    }  # fmt: skip
    shape = {"n_layer": 28, "n_head": 16, "n_kv_head": 8, "n_embd": 1024, "head_size": 128}
    config = ModelConfig(architecture="qwen3", **shape, block_size=1024)
    check_settings(parse_config(json.dumps(published).encode()), config)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**published))
    wanted = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    table = parameter_table(config, 151936)
    parts = [(name, rows, row) for row in table for name, rows in zip(row.theirs, row.rows, strict=True)]
    assert {name: (rows, *row.shape[1:]) for name, rows, row in parts} == wanted
    assert count_parameters(config, 151936) == 596_049_920


def test_equal_models_give_equal_bytes(tmp_path: Path, model: CheckpointModel, folder: Path) -> None:
    write_model_directory(tmp_path / "again", model, card="# A card\n")
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert all((folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_the_files_are_those_the_hub_expects(folder: Path) -> None:
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == names | {"tokenizer.json", "tokenizer_config.json"}
    assert (folder / "README.md").read_text() == "# A card\n"


READ_ELSEWHERE = {
    "gpt2": {"n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon", "activation_function"},
    "qwen3": {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "hidden_act", "attention_bias"),
    },
}
"""What vLLM's model files and llama.cpp's converter look up by name; neither is run here."""


def test_what_serving_programs_read_of_a_configuration_is_written(model: CheckpointModel, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shared = {"architectures", "model_type", "vocab_size", "tie_word_embeddings", "torch_dtype", "eos_token_id"}
    wanted = shared | READ_ELSEWHERE["gpt2" if config["model_type"] == "gpt2" else "qwen3"]
    assert {name for name in wanted if config.get(name) is None} == set()


def test_a_tied_embedding_is_written_once_and_the_format_is_named(model: CheckpointModel, folder: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        tables = [name for name in file.keys() if "embed" in name or "wte" in name or "head" in name]  # noqa: SIM118
    assert len(tables) == (1 if model.network.config.tied else 2)


@pytest.mark.parametrize("place", ["full", "full/file.txt"])
def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, model: CheckpointModel, place: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file.txt").write_text("mine")
    with pytest.raises(TaskError, match="name a"):
        write_model_directory(tmp_path / place, model, card="")
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file.txt"]


def test_a_network_that_transformers_does_not_know_is_refused_by_its_keys(tmp_path: Path) -> None:
    model = opened(tmp_path, network={"architecture": "qwen3", "feed_forward": "relu2"})
    with pytest.raises(InvalidInput, match=r"model\.feed_forward = relu2: transformers has no such network"):
        write_model_directory(tmp_path / "out", model, card="")
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path, model: CheckpointModel) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TaskError, match="cannot be written"):
        write_model_directory(tmp_path / "file" / "below", model, card="")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
