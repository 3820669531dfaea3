"""Which keys of a configuration could name something of a machine, and that none of those is taken from a log."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import SecretStr

from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.configuration.stored_configuration import parse_stored_configuration

SCHEMA = RunConfig.model_json_schema()
OF_THE_MACHINE = {
    "exporters.tensorboard", "exporters.wandb", "exporters.mlflow", "preemption.notice_file", "preemption.metadata",
    "evaluation.suite", "evaluation.command", "machines.check", "notify.command", "notify.webhook", "notify.block",
    "code.allow", "code.files",
}  # fmt: skip
NOT_ANY_TEXT = {"preemption.metadata", "notify.block", "code.allow"}
OF_FILES_THAT_A_MACHINE_ALLOWS = {"model.module", "model.imports", "model.arguments"}
READ_WHEN_A_RUN_IS_OPENED = {"data.sources", "data.val_sources", "data.tokenizer", "training.init_from"}
PROMOTION_GATES = {"promotion.gates.metric", "promotion.gates.suite"}
MARKED_AS_LOGGED = {f"evaluation.evaluators.{name}" for name in ("command", "files", "folder")}
MERELY_WORDS = {"evaluation.prompts", "data.exclude", "data.end_of_text", *PROMOTION_GATES}
NOT_IN_A_LOG = {"store"}
VALUES = {"preemption.metadata": "aws", "exporters.mlflow": "http://127.0.0.1:9", "evaluation.command": ["true"]}


def free_words(node: Mapping[str, Any], key: str = "") -> Iterator[str]:
    """Yield every key below a schema whose value, or a part of it, may be any text."""
    node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    inner = [*node.get("anyOf", []), *node.get("allOf", []), *([node["items"]] if "items" in node else [])]
    for part in inner:
        yield from free_words(part, key)
    for name, part in node.get("properties", {}).items():
        yield from free_words(part, f"{key}.{name}".strip("."))
    is_text = node.get("type") == "string" and not node.keys() & {"enum", "const", "pattern"}
    if is_text or node.get("additionalProperties"):
        yield key


def test_every_key_that_could_name_something_of_a_machine_is_one_that_was_thought_of() -> None:
    known = READ_WHEN_A_RUN_IS_OPENED | MARKED_AS_LOGGED | MERELY_WORDS | NOT_IN_A_LOG | OF_THE_MACHINE
    known |= OF_FILES_THAT_A_MACHINE_ALLOWS
    assert set(free_words(SCHEMA)) == known - NOT_ANY_TEXT, "each names an endpoint"


@pytest.mark.parametrize("key", sorted(OF_THE_MACHINE))
def test_what_only_this_machine_may_say_is_not_taken_from_a_log(key: str) -> None:
    section, _, name = key.partition(".")
    logged = {"data": {"sources": ["a"]}, "training": {"steps": 1}, section: {name: VALUES.get(key, "/somewhere")}}
    assert getattr(getattr(parse_stored_configuration(logged), section), name) in ("", (), {}, None, SecretStr(""))
