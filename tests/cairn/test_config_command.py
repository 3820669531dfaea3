"""`cairn config`: all keys, one section, one key; a key that does not exist is refused in `command_lines`."""

import json

from tests.commands import Cairn


def printed(cairn: Cairn, *arguments: str) -> str:
    ended = cairn("config", *arguments)
    assert ended.code == 0, ended.err
    return ended.out


def test_all_keys_are_listed(cairn: Cairn) -> None:
    text = printed(cairn)
    assert all(key in text for key in ("model_family", "data.sources", "training.lr", "budgets.oom.retries"))


def test_a_section_lists_its_keys_alone(cairn: Cairn) -> None:
    keys = [line.split()[0] for line in printed(cairn, "lease").splitlines()[1:]]
    assert keys == ["lease.seconds", "lease.heartbeat_seconds"]


def test_a_key_is_explained(cairn: Cairn) -> None:
    text = printed(cairn, "checkpoint.grace_seconds")
    assert [
        word for word in ("preempted attempt", "a number above 0", "seconds", "30.0", "no: ") if word not in text
    ] == []


def test_a_key_is_one_json_object_and_a_section_a_list(cairn: Cairn) -> None:
    key = json.loads(printed(cairn, "training.steps", "--json"))
    assert key == {
        "key": "training.steps",
        "meaning": "number of optimizer steps of the run",
        "unit": "steps",
        "rule": "a whole number above 0",
        "default": "required",
        "frozen": True,
    }
    assert key in json.loads(printed(cairn, "training", "--json"))


def test_a_list_of_tables_is_listed_with_the_keys_of_its_items(cairn: Cairn) -> None:
    keys = [key["key"] for key in json.loads(printed(cairn, "evaluation.evaluators", "--json"))]
    assert keys[:2] == ["evaluation.evaluators", "evaluation.evaluators.name"]
