"""What the deployments' forms say and refuse: titles, descriptions, rules, before any flow run exists."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import ValidationError, validate

from tasks.configuration.key_reference import meaning_of

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]


def schema_of(name: str) -> dict[str, Any]:
    (entrypoint,) = [item["entrypoint"] for item in DEPLOYMENTS if item["name"] == name]
    module, _, flow = entrypoint.rpartition(".")
    return parameter_schema(getattr(import_module(module), flow)).model_dump()


def is_accepted(name: str, **parameters: Any) -> bool:
    (defaults,) = [item["parameters"] for item in DEPLOYMENTS if item["name"] == name]
    try:
        validate({**defaults, **parameters}, schema_of(name), raise_on_error=True)
    except ValidationError:
        return False
    return True


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
    description = schema_of("train-gpt")["properties"]["overrides"]["description"]
    assert f"training.lr ({meaning_of('training.lr')})" in description and meaning_of("training.lr")


@pytest.mark.parametrize("name", [item["name"] for item in DEPLOYMENTS])
def test_no_parameter_is_one_of_several_types_for_which_the_form_would_show_raw_json(name: str) -> None:
    assert [key for key, item in schema_of(name)["properties"].items() if "type" not in item] == []


@pytest.mark.parametrize("name", [item["name"] for item in DEPLOYMENTS])
def test_the_deployments_own_parameters_are_accepted_and_known(name: str) -> None:
    (defaults,) = [item["parameters"] for item in DEPLOYMENTS if item["name"] == name]
    assert is_accepted(name) and defaults.keys() <= schema_of(name)["properties"].keys()


@pytest.mark.parametrize(
    "parameters",
    [
        {"config": "quickstart"},
        {"config": "runs/my run.toml"},
        {"config": "s3://bucket/runs/bard.toml", "store": "s3://bucket/cairn"},
        {"config": "https://example.org/bard.toml", "run_id": "bard-1.2"},
        {"config": "", "run_id": "bard"},
        {"overrides": ["training.steps=1200", 'data.sources=["a b.txt"]', "evaluation.command="]},
    ],
)
def test_what_people_mean_is_accepted(parameters: dict[str, Any]) -> None:
    assert is_accepted("train-gpt", **parameters)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("train-gpt", {"config": 7}),
        ("train-gpt", {"config": " quickstart"}),
        ("train-gpt", {"run_id": "../bard"}),
        ("train-gpt", {"run_id": "bard one"}),
        ("train-gpt", {"overrides": "training.steps=1"}),
        ("train-gpt", {"overrides": ["training.steps"]}),
        ("train-gpt", {"overrides": ["=1"]}),
        ("train-gpt", {"start_over": "perhaps"}),
        ("train-gpt", {"store": "s3://bucket "}),
        ("watch-runs", {"deployment": "train-gpt"}),
        ("sweep-checkpoints", {"most_seconds": 0}),
        ("sweep-checkpoints", {"dry_run": "perhaps"}),
        ("evaluate-promoted", {"reference": ""}),
        ("evaluate-promoted", {"reference": "a run@5"}),
    ],
)
def test_what_cannot_be_meant_is_refused_by_the_schema(name: str, parameters: dict[str, Any]) -> None:
    assert not is_accepted(name, **parameters)
