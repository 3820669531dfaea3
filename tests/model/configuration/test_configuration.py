"""What configuration accepts and refuses."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from cairn.model.configuration.data import DataConfig
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import UNFROZEN_TRAINING, TrainingConfig


def test_reading_the_configuration_module_does_not_import_torch() -> None:
    code = "import sys, cairn.model.configuration; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MIXTURE, PINNED = {"sources": ("a", "b")}, "snapshot:0123abcd"
REFUSED = {
    ModelConfig: [
        ({"n_embd": 130, "n_head": 4}, ["n_embd=130", "divisible", "n_head=4"]),
        ({"n_layer": 0}, ["n_layer", "greater than 0", "0"]),
        ({"dropout": 1.0}, ["dropout", "less than 1", "1.0"]),
        ({"layers": 3}, ["layers", "not permitted"]),
        ({"rotary_scaling": ()}, ["rotary_scaling", "at least 1 item"]),
        ({"rotary_scaling": (8.0, 1.0)}, ["rotary_scaling=[8.0, 1.0]", "one number, or Llama 3's four"]),
        ({"rotary_scaling": (8.0, 4.0, 4.0, 8192)}, ["rotary_scaling=", "the second is below the third"]),
        ({"rotary_scaling": (8.0, 1.0, 4.0, 0.5)}, ["rotary_scaling=", "the last whole"]),
    ],
    TrainingConfig: [
        ({"warmup_steps": 11}, ["warmup_steps=11", "at most", "steps=10"]),
        ({"global_batch": 4, "micro_batch": 5}, ["micro_batch=5", "at most", "global_batch=4"]),
        ({"min_lr": 0.1}, ["min_lr=0.1", "at most", "lr=0.001"]),
        ({"steps": 1, "min_lr": 0.0}, ["min_lr=0", "steps=1", "the only step is the last"]),
        ({"precision": "fp8"}, ["precision", "fp8"]),
        ({"device": "tpu"}, ["device", "tpu"]),
        ({"kernels": "fused", "precision": "fp16"}, ["kernels='fused'", "precision='fp16'", "bf16"]),
        ({"betas": (0.9, 1.0)}, ["betas", "less than 1"]),
    ],
    DataConfig: [
        *(({"tokenizer": name}, [name]) for name in ("byte", "bpe:", "bpe:256", "bpe:-1", "bpe:1e3", "words:300")),
        *(({"text_field": field}, ["text_field"]) for field in ("", 'a"b', "a\\b", "a\nb")),
        *(({"sources": sources}, ["sources"]) for sources in ((), ("",))),
        ({"val_fraction": 0.0}, ["val_fraction"]),
        ({**MIXTURE, "weights": (1.0,)}, ["as many as the 2 sources"]),
        ({**MIXTURE, "weights": (1.0, 2.0, 3.0)}, ["as many as the 2 sources"]),
        ({**MIXTURE, "weights": (1.0, 0.0)}, ["'b' has 0 from the first step to the last"]),
        ({**MIXTURE, "weights": (1.0, -1.0)}, ["greater than or equal to 0"]),
        ({**MIXTURE, "weights": (1.0, float("inf"))}, ["finite"]),
        ({**MIXTURE, "weights": (1.0, float("nan"))}, ["weights"]),
        ({**MIXTURE, "weights": (1.0, 1e-12)}, ["round them to fewer digits"]),
        ({"sources": ("in/a", "./in/a"), "weights": (1, 2)}, ["'a' is named twice"]),
        ({"sources": (PINNED, "a.txt")}, ["must be the only one"]),
        *(
            ({"sources": (f"snapshot:{digest}",)}, ["at least its first 8 characters"])
            for digest in ("0123abc", "0123ABCD", "0" * 65)
        ),
        ({"sources": (PINNED,), "weights": (1.0,)}, [f"weights: decided by '{PINNED}'"]),
        ({"sources": (PINNED,), "tokenizer": "bytes", "val_fraction": 0.5}, ["val_fraction, tokenizer: "]),
    ],
}
LEAST: dict[Any, Any] = {
    ModelConfig: {},
    TrainingConfig: {"steps": 10},
    DataConfig: {"sources": ("a.txt",)},
}


@pytest.mark.parametrize(
    ("section", "fields", "words"), [(section, *case) for section, cases in REFUSED.items() for case in cases]
)
def test_the_impossible_is_refused_with_field_value_and_rule(section, fields, words) -> None:
    with pytest.raises(ValidationError) as caught:
        section(**{**LEAST[section], **fields})
    assert all(word in str(caught.value) for word in words)


def test_unfrozen_fields_are_fields() -> None:
    assert set(TrainingConfig.model_fields) >= UNFROZEN_TRAINING


def test_attention_crosses_documents_unless_said_and_that_is_frozen() -> None:
    assert not TrainingConfig(steps=1).mask_documents and "mask_documents" not in UNFROZEN_TRAINING


def test_the_arithmetic_is_left_to_cairn_until_it_is_said_and_then_it_is_frozen() -> None:
    assert (TrainingConfig(steps=1).precision, TrainingConfig(steps=1).kernels) == ("auto", "auto")
    assert {"precision", "kernels"}.isdisjoint(UNFROZEN_TRAINING)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:257", "somewhere/tokenizer.json"])
def test_known_tokenizers_are_accepted(tokenizer) -> None:
    assert DataConfig(sources=("a.txt",), tokenizer=tokenizer).tokenizer == tokenizer


@pytest.mark.parametrize("config", [DataConfig(sources=("a", "b"), weights=(3, 1)), TrainingConfig(steps=1)])
def test_every_key_is_written_to_the_log_and_read_back(config) -> None:
    document = config.model_dump(mode="json")
    assert set(document) == set(type(config).model_fields) and type(config).model_validate(document) == config


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (("b/*.txt", "a.txt"), ("b/*.txt", "a.txt")),
        (("/here/b/*.txt", "/here/a.txt"), ("b/*.txt", "a.txt")),
        (("../x/b/*.txt", "../x/./a.txt"), ("b/*.txt", "a.txt")),
        (("/a.txt", "/b/c.txt"), ("a.txt", "b/c.txt")),
        (("/here/a.txt", "b.txt"), ("/here/a.txt", "b.txt")),
        (("s3://bucket/x/*.txt", "x/a.txt", "python:topics"), ("s3://bucket/x/*.txt", "a.txt", "python:topics")),
    ],
)
def test_a_source_is_named_from_the_folder_all_paths_share(sources, names) -> None:
    assert DataConfig(sources=sources).source_names == names


def test_a_snapshot_is_a_source() -> None:
    assert DataConfig(sources=("snapshot:0123abcd",)).snapshot == "0123abcd"
    assert DataConfig(sources=("a.txt",)).snapshot is None


@pytest.mark.parametrize("kernels", ["auto", "stock", "fused"])
def test_a_configuration_survives_its_own_json(kernels) -> None:
    config = TrainingConfig(steps=10, betas=(0.8, 0.9), micro_batch=7, kernels=kernels)
    assert TrainingConfig.model_validate_json(config.model_dump_json()) == config
