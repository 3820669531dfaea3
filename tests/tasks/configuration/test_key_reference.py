"""Every configuration key is explained beside its field; errors, page and suggestions are made of that."""

from typing import Any

import pytest

from cairn.storage.errors import IntegrityError
from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.configuration.key_reference import ConfigurationKey, keys_by_name, section_meanings, suggest_key
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.configuration.stored_configuration import parse_stored_configuration
from cairn.tasks.errors import InvalidConfiguration

PYDANTIC_WORDS = ("Input should", "Value error", "PydanticUndefined", "String should", "Field required", "^[")
BROKEN: dict[str, Any] = {
    "data": {"sources": ["a"], "weights": [0], "tokenizer": "words", "text_field": '"'},
    "training": {"stepz": 1, "lr": -1, "micro_batch": -2, "betas": [0.9], "precision": "fp8", "device": "tpu"},
    "model": {"n_heads": 2, "n_layer": 0},
    "checkpoint": {"every_steps": "often"},
    "evaluation": {"evaluators": [{"nam": "x", "command": "a b", "files": 3}]},
    "budgets": {"bad-data": {"retries": -1}, "lots": {"total": 3}},
    "cost": {"currency": "12345"},
    "watchdog": 7,
    "lr": 1,
    "trainin": {"steps": 1},
}


def broken_lines(document: dict[str, Any], *overrides: str, **environment: str) -> list[str]:
    with pytest.raises(InvalidConfiguration) as refused:
        parse_configuration(document, overrides=overrides, environment=environment, name="run.toml")
    return str(refused.value).splitlines()


@pytest.mark.parametrize("key", keys_by_name().values(), ids=lambda key: key.key)
def test_a_key_has_a_meaning_a_rule_and_a_default_in_words(key: ConfigurationKey) -> None:
    assert key.meaning and key.rule and key.default and not key.meaning.endswith(".")
    assert not [sign for sign in ("^", "\\", "PydanticUndefined") if sign in key.meaning + key.default]
    assert "[" not in key.rule


def test_every_section_has_its_sentence() -> None:
    assert [name for name, meaning in section_meanings().items() if not meaning] == []


def test_the_frozen_keys_are_those_of_the_frozen_document() -> None:
    frozen = RunConfig.model_validate({"data": {"sources": ["a"]}, "training": {"steps": 1}}).frozen()
    expected = {"model_family", *(f"{name}.{key}" for name in ("data", "model", "training") for key in frozen[name])}
    expected |= {"model.module", "model.imports"}  # which only the document of a module has
    frozen_keys = {key.key for key in keys_by_name().values() if key.frozen}
    assert {".".join(key.split(".")[:2]) for key in frozen_keys} == expected  # a list of tables is frozen as a whole


@pytest.mark.parametrize(
    ("key", "unit", "default"),
    [
        ("training.steps", "steps", "required"),
        ("lease.seconds", "seconds", None),
        ("checkpoint.grace_seconds", "seconds", None),
        ("budgets.lost.wasted_gpu_seconds", "device seconds", None),
        ("model.block_size", "tokens", None),
        ("training.lr", "", "0.001"),
        ("training.micro_batch", None, '"auto"'),
        ("training.threads", None, "1"),
        ("budgets.oom.retries", None, "6"),
        ("budgets.bad-data.samples", None, "256"),
    ],
)
def test_a_unit_and_a_default_are_named(key: str, unit: str | None, default: str | None) -> None:
    found = keys_by_name().get(key)
    assert found is not None and unit in (None, found.unit) and default in (None, found.default)


def test_nothing_is_suggested_for_what_is_like_no_key() -> None:
    assert suggest_key("zzz") is None


@pytest.mark.parametrize(
    "line",
    [
        "run.toml: model.n_heads = 2: unknown key; did you mean model.n_head (number of attention heads in a layer)?",
        "run.toml: training.lr = -1: must be a number above 0; learning rate after the warm-up",
        "run.toml: training.steps: missing; number of optimizer steps of the run",
        "run.toml: training.precision = 'fp8': must be one of auto, fp32, bf16, fp16; number format of the arithmetic",
        "run.toml: training.device = 'tpu': must be auto, cpu, cuda, cuda:<number> or mps; device that trains",
        "run.toml: lr = 1: unknown key; did you mean training.lr (learning rate after the warm-up)?",
        "run.toml: trainin: unknown section; did you mean training (How the network is trained)?",
        "run.toml: watchdog = 7: must be a section; `cairn config watchdog` lists its keys",
        "run.toml: model.n_layer = 0: must be a whole number above 0; number of transformer layers",
        "run.toml: data.tokenizer = 'words': must be 'bytes', 'bpe:<size>' or the path of a tokenizer.json",
        "run.toml: evaluation.evaluators.0.name: missing; name of its suite in the log",
    ],
)
def test_a_broken_rule_is_one_line_with_key_value_rule_and_meaning(line: str) -> None:
    assert line in broken_lines(BROKEN)


def test_no_line_has_words_of_the_validator() -> None:
    lines = broken_lines(BROKEN)
    assert [line for line in lines for words in PYDANTIC_WORDS if words in line] == []
    assert len(lines) == len({line.partition(": ")[2].partition(":")[0] for line in lines})


def test_a_line_names_the_option_or_variable_that_set_the_value() -> None:
    document = {"data": {"sources": ["a"]}, "training": {"steps": 1}, "budgets": {"bad-data": {"retries": 1}}}
    lines = broken_lines(document, "training.lr=-1", CAIRN_TRAINING__STEPZ="3", CAIRN_BUDGETS__BAD_DATA__RETRIES="-1")
    assert [line.partition(" ")[0] for line in lines] == [
        "--set",
        "CAIRN_TRAINING__STEPZ:",
        "CAIRN_BUDGETS__BAD_DATA__RETRIES:",
    ]


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"steps": 1, "lr": -1}, "training.lr = -1: must be a number above 0; .*; the log was"),
        (
            {"steps": 1, "newer": 1},
            "training.newer = 1: unknown key; .* a newer cairn wrote the log",
        ),
    ],
)
def test_a_log_with_an_invalid_configuration_is_refused_in_the_same_words(training: dict[str, Any], words: str) -> None:
    with pytest.raises(IntegrityError, match=words):
        parse_stored_configuration({"data": {"sources": ["a"]}, "training": training})
