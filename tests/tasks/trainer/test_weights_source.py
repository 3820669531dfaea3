"""What comes with somebody's weights and goes on with them: unused rows, special tokens, ends, a chat template."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.processors import TemplateProcessing

from cairn.model.architectures.gpt import GPT
from cairn.model.configuration.data import DataConfig
from cairn.model.configuration.network import ModelConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.model.errors import InvalidInput
from cairn.model.inference.prediction import Sampling, generate_stream
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.tasks.data.foreign_tokenizer import parse_tokenizer
from cairn.tasks.data.snapshot_build import build_snapshot
from cairn.tasks.evaluator.checkpoint_model import CheckpointModel, write_model_directory
from cairn.tasks.trainer.initial_weights import (
    InitialDirectory,
    WeightsSource,
    adopt_network,
    describe_source,
    keep_initial_weights,
    keep_source,
    read_initial_weights,
    read_source,
)
from tests.memory_store import MemoryStore

pytestmark = [
    pytest.mark.xdist_group("transformers"),  # importing it takes seconds
    pytest.mark.usefixtures("forked_parsers"),
]
TEXT = "\n\n".join(f"Zeile {number} über Ünïcode, 東京 and stones;\n\tthe {number}th cairn." for number in range(80))
IDS, ROWS = 303, 384
CHAT = "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}\n"
SHAPE = {"vocab_size": ROWS, "bos_token_id": 301, "eos_token_id": 300}
LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16} | {
    "intermediate_size": 20, "max_position_embeddings": 64, "tie_word_embeddings": True, "initializer_range": 0.5
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 24, "rope_theta": 500.0
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_positions": 32, "n_embd": 12, "n_layer": 2, "n_head": 3}),
    "Qwen3ForCausalLM": ("Qwen3Config", LLAMA | {"head_dim": 6}),
    "LlamaForCausalLM": ("LlamaConfig", LLAMA | {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
}


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of 303 ids that begins each text with <s>, and its documents."""
    tokenizer = LibraryTokenizer.from_str(Tokenizer.train_bpe([TEXT], 301).json)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 301)])
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "additional_special_tokens": ["<|im_end|>"]}
    code = {"AutoTokenizer": ["code.Tokenizer", None]}
    documents = {
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": code, **marks},
        "special_tokens_map": marks,
        "generation_config": {"bos_token_id": 301, "eos_token_id": [300, 302], "temperature": 0.6, "do_sample": True},
    }
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Somebody's\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Somebody:
    """A published folder `theirs`, the model that a run begins with, and its export `out` before the first step."""

    theirs: Path
    out: Path
    source: WeightsSource
    model: CheckpointModel


@pytest.fixture(scope="module", params=KINDS)
def somebody(
    request: pytest.FixtureRequest, transformers: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Somebody:
    folder = tmp_path_factory.mktemp("somebody")
    name, settings = KINDS[request.param]
    torch.manual_seed(5)
    network = getattr(transformers, request.param)(getattr(transformers, name)(**SHAPE, **settings))
    network.save_pretrained(folder / "theirs")
    save_tokenizer(folder / "theirs")
    store, directory = MemoryStore(), InitialDirectory("theirs", folder)
    (folder / "a.txt").write_text(TEXT, encoding="utf-8")
    data = DataConfig(sources=("a.txt",), tokenizer="theirs/tokenizer.json", val_fraction=0.3)
    snapshot = open_snapshot(store, build_snapshot(store, data, folder).snapshot_id, folder / "cache")
    config = adopt_network(directory, ModelConfig())
    kept = keep_initial_weights(store, directory, config, tokenizer_json=snapshot.tokenizer_json, vocab_size=IDS)
    ours = GPT(config, snapshot.manifest.vocab_size).eval()
    arrays = read_initial_weights(store, kept.weights_sha256)
    ours.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    model = CheckpointModel(network=ours, tokenizer=parse_tokenizer(snapshot.tokenizer_json), snapshot=snapshot)
    source = read_source(store, kept.source_sha256)
    write_model_directory(folder / "out", model, card="", source=source)
    return Somebody(theirs=folder / "theirs", out=folder / "out", source=source, model=model)


def test_what_was_imported_is_exported_with_the_same_tensors(somebody: Somebody) -> None:
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (somebody.theirs, somebody.out))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_what_was_imported_is_exported_with_the_same_configuration(
    transformers: ModuleType, somebody: Somebody
) -> None:
    folders = (somebody.theirs, somebody.out)
    theirs, ours = (transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in folders)
    assert theirs == {**ours, "_name_or_path": str(somebody.theirs)} and ours["vocab_size"] == ROWS


def test_transformers_computes_the_same_logits_over_all_rows(transformers: ModuleType, somebody: Somebody) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(somebody.out).eval()
    ids = torch.tensor([somebody.model.tokenizer.encode_batch([TEXT])[0][:60]]).view(2, 30)
    with torch.no_grad():
        ours = somebody.model.network(ids)
        assert ours.shape[2] == ROWS and (theirs(ids).logits - ours).abs().max() < 1e-4 * ours.abs().max()


def test_no_row_beyond_the_ids_is_ever_drawn(somebody: Somebody) -> None:
    network = somebody.model.network
    before = network.head_weight.detach().clone()
    try:
        with torch.no_grad():  # the padding is by far the likeliest, whatever the text
            network.head_weight[IDS:] = 1e3 * network.ln_f(network.wte.weight[:1])
        hot = Sampling(temperature=5.0)
        for sampling in (Sampling(temperature=0), hot):
            assert max(generate_stream(network, [1, 2], new_tokens=20, sampling=sampling)) < IDS
    finally:
        with torch.no_grad():
            network.head_weight.copy_(before)


def test_special_tokens_ends_and_the_begin_token_are_carried_on(transformers: ModuleType, somebody: Somebody) -> None:
    found = [transformers.AutoTokenizer.from_pretrained(folder) for folder in (somebody.theirs, somebody.out)]
    theirs, ours = ((one("Zeile <|im_end|>")["input_ids"], one.special_tokens_map) for one in found)
    assert theirs == ours and ours[0][0] == 301 and ours[0][-1] == 302
    generation = transformers.GenerationConfig.from_pretrained(somebody.out)
    assert (generation.eos_token_id, generation.temperature) == ([300, 302], 0.6)


def test_every_end_of_its_documents_ends_a_text_unless_the_tokenizer_is_another(somebody: Somebody) -> None:
    assert somebody.source.end_ids == {300, 302}
    files = {name: digest for name, digest in somebody.source.files.items() if name != "tokenizer.json"}
    assert replace(somebody.source, files=files).end_ids == frozenset()


def test_the_chat_template_is_carried_on(transformers: ModuleType, somebody: Somebody) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(somebody.out)
    said = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert said == "<s>[user] Hi" and (somebody.out / "chat_template.jinja").read_text(encoding="utf-8") == CHAT


def test_no_document_of_an_export_names_code(somebody: Somebody) -> None:
    assert [path.name for path in somebody.out.iterdir() if "auto_map" in path.read_text(errors="replace")] == []


def test_the_licence_and_the_hash_of_each_file_are_kept(somebody: Somebody) -> None:
    assert (somebody.source.licence, somebody.source.name) == ("apache-2.0", "theirs")
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= somebody.source.files.keys()


def large(path: Path) -> None:
    path.write_text(json.dumps({"a": "b" * (3 << 20)}), encoding="utf-8")


def no_object(path: Path) -> None:
    path.write_text("[]", encoding="utf-8")


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe{}")


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("spoil", [large, no_object, no_text])
def test_a_document_that_is_none_is_refused_by_name(tmp_path: Path, name: str, spoil: Callable[[Path], None]) -> None:
    save_tokenizer(tmp_path)
    spoil(tmp_path / name)
    with pytest.raises(InvalidInput, match=name):
        describe_source(tmp_path, {}, has_tokenizer=True)


def test_documents_of_another_tokenizer_are_left_behind(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert describe_source(tmp_path, {}, has_tokenizer=False).documents.keys() == {"generation_config.json"}


def test_documents_that_are_too_large_together_are_refused(tmp_path: Path) -> None:
    texts = {f"{number}.json": "x" * (2 << 20) for number in range(5)}
    source = WeightsSource(name="a", licence="", files={}, documents=texts)
    with pytest.raises(InvalidInput, match=r"rule: at most 8,388,608"):
        keep_source(MemoryStore(), source)
