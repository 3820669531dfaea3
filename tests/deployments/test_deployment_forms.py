"""What the deployments' forms say and refuse: titles, descriptions, rules, before any flow run exists."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import ValidationError, validate

from cairn.tasks.configuration.key_reference import keys_by_name

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]


def schema_of(name: str) -> dict[str, Any]:
    (entrypoint,) = [item["entrypoint"] for item in DEPLOYMENTS if item["name"] == name]
    module, _, flow = entrypoint.rpartition(".")
    return parameter_schema(getattr(import_module(module), flow)).model_dump()


def refusal(name: str, **parameters: Any) -> str:
    """Return what the server answers to these parameters; empty if it accepts them."""
    (defaults,) = [item["parameters"] for item in DEPLOYMENTS if item["name"] == name]
    try:
        validate({**defaults, **parameters}, schema_of(name), raise_on_error=True)
    except ValidationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [item["name"] for item in DEPLOYMENTS])
def test_every_parameter_of_every_form_has_a_title_a_description_and_a_default(name: str) -> None:
    properties = schema_of(name)["properties"]
    bare = [
        key
        for key, item in properties.items()
        if not item.get("description") or "default" not in item or item["title"] == key
    ]
    assert bare == [] and properties


def test_the_form_of_a_training_run_explains_keys_in_the_words_of_their_fields() -> None:
    fields = schema_of("train-gpt")["properties"]
    rate, overrides = fields["learning_rate"]["description"], fields["overrides"]["description"]
    assert (
        rate.startswith(f"{keys_by_name()['training.lr'].summary} (training.lr), such as 0.001; 0: ")
        and keys_by_name()["training.lr"].summary
    )
    assert f"model.n_layer ({keys_by_name()['model.n_layer'].summary})" in overrides


def test_the_common_settings_have_typed_fields_in_the_order_of_their_use() -> None:
    fields = schema_of("train-gpt")["properties"]
    types = {name: fields[name]["type"] for name in sorted(fields, key=lambda name: int(fields[name]["position"]))}
    assert list(types.items())[:6] == [
        *(("config", "string"), ("run_id", "string"), ("steps", "integer"), ("learning_rate", "number")),
        *(("micro_batch", "integer"), ("store", "string")),
    ]
    assert all(fields[name]["examples"] for name in list(types)[:6])


@pytest.mark.parametrize("name", [item["name"] for item in DEPLOYMENTS])
def test_no_parameter_is_one_of_several_types_for_which_the_form_would_show_raw_json(name: str) -> None:
    assert [key for key, item in schema_of(name)["properties"].items() if "type" not in item] == []


@pytest.mark.parametrize("name", [item["name"] for item in DEPLOYMENTS])
def test_the_deployments_own_parameters_are_accepted_and_known(name: str) -> None:
    (defaults,) = [item["parameters"] for item in DEPLOYMENTS if item["name"] == name]
    assert not refusal(name) and defaults.keys() <= schema_of(name)["properties"].keys()


@pytest.mark.parametrize(
    "parameters",
    [
        {"config": "quickstart"},
        {"config": "runs/my run.toml"},
        {"config": "s3://bucket/runs/bard.toml", "store": "s3://bucket/cairn"},
        {"config": "https://example.org/bard.toml", "run_id": "bard-1.2"},
        {"config": "", "run_id": "bard"},
        {"steps": 1200, "learning_rate": 1e-3, "micro_batch": 8},
        {
            "overrides": [
                "training.steps=1200",
                "budgets.bad-data.retries=0",
                'data.sources=["a b.txt"]',
                "evaluation.command=",
            ]
        },
    ],
)
def test_what_people_mean_is_accepted(parameters: dict[str, Any]) -> None:
    assert refusal("train-gpt", **parameters) == ""


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("train-gpt", {"config": 7}),
        ("train-gpt", {"config": " quickstart"}),
        ("train-gpt", {"run_id": 2024}),
        ("train-gpt", {"run_id": "../bard"}),
        ("train-gpt", {"run_id": "bard one"}),
        ("train-gpt", {"overrides": "training.steps=1"}),
        ("train-gpt", {"overrides": ["training.steps"]}),
        ("train-gpt", {"overrides": ["=1"]}),
        ("train-gpt", {"overrides": ["training.stpes=1"]}),
        ("train-gpt", {"steps": -1}),
        ("train-gpt", {"steps": 1.5}),
        ("train-gpt", {"learning_rate": "fast"}),
        ("train-gpt", {"micro_batch": -8}),
        ("train-gpt", {"start_over": "perhaps"}),
        ("train-gpt", {"store": "s3://bucket "}),
        ("watch-runs", {"deployment": "train-gpt"}),
        ("sweep-checkpoints", {"most_seconds": 0}),
        ("sweep-checkpoints", {"dry_run": "perhaps"}),
        ("evaluate-promoted", {"reference": ""}),
        ("evaluate-promoted", {"reference": "a run@5"}),
    ],
)
def test_what_cannot_be_meant_is_refused_by_the_schema_in_words(name: str, parameters: dict[str, Any]) -> None:
    words = refusal(name, **parameters)
    assert next(iter(parameters)) in words and "does not match" not in words


def test_an_unknown_key_is_refused_with_the_rule_and_an_example() -> None:
    rule = "section.key=value with a key that `cairn config` lists, such as training.warmup_steps=50"
    assert rule in refusal("train-gpt", overrides=["training.stpes=1"])


def test_a_run_id_that_a_shell_made_a_number_is_refused_with_what_makes_it_a_text() -> None:
    assert 'a number needs quotes of JSON inside those of the shell, as run_id="2024"' in refusal(
        "train-gpt", run_id=2024
    )
    assert refusal("train-gpt", run_id="2024") == ""
