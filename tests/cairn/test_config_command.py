"""`cairn config`: all keys, one section, one key, and the refusal of a key that does not exist."""

import json

import pytest

from cairn.cli.command import run_command


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command(["config", *arguments]) == 0
    return capsys.readouterr().out


def test_all_keys_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    assert all(key in text for key in ("model_family", "data.sources", "training.lr", "budgets.oom.retries"))


def test_a_section_lists_its_keys_alone(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [line.split()[0] for line in printed(capsys, "lease").splitlines()[1:]]
    assert keys == ["lease.seconds", "lease.heartbeat_seconds"]


def test_a_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "checkpoint.grace_seconds")
    assert [
        word for word in ("preempted attempt", "a number above 0", "seconds", "30.0", "no: ") if word not in text
    ] == []


def test_a_key_is_one_json_object_and_a_section_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    key = json.loads(printed(capsys, "training.steps", "--json"))
    assert key == {
        "key": "training.steps",
        "meaning": "number of optimizer steps of the run",
        "unit": "steps",
        "rule": "a whole number above 0",
        "default": "required",
        "frozen": True,
    }
    assert key in json.loads(printed(capsys, "training", "--json"))


def test_a_list_of_tables_is_listed_with_the_keys_of_its_items(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [key["key"] for key in json.loads(printed(capsys, "evaluation.evaluators", "--json"))]
    assert keys[:2] == ["evaluation.evaluators", "evaluation.evaluators.name"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("training.stepz", "did you mean training.steps (number of optimizer steps of the run)?"),
        ("trainin", "did you mean training ("),
        ("zzz", "`cairn config` lists the keys"),
    ],
)
def test_a_wrong_key_is_refused_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], key: str, words: str
) -> None:
    assert run_command(["config", key]) == 2
    assert words in capsys.readouterr().err
