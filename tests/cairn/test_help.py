"""What a person meets before the first run: the list of verbs, each verb's help, completion, refusals in one line."""

import re
from dataclasses import fields

import pytest

from cairn.cli.app import app, describe_fields, find_record, list_records, read_examples
from tests.commands import Cairn

VERBS = sorted(name for name in app if not name.startswith("-"))


def helped(cairn: Cairn, *arguments: str) -> str:
    ended = cairn(*arguments, "--help")
    assert ended.code == 0
    return ended.out


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_ends_with_an_example_of_it(cairn: Cairn, verb: str) -> None:
    lines = helped(cairn, verb).rstrip().splitlines()
    assert any(line.startswith(f"  cairn {verb}") for line in lines[lines.index("Examples:") :])


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "completion"])
def test_every_verb_can_print_json_and_be_told_its_store(cairn: Cairn, verb: str) -> None:
    options = ("--json",) if verb in ("config", "init") else ("--json", "--store")  # keys and texts are of no store
    assert all(option in helped(cairn, verb) for option in options)


def test_the_fields_of_every_record_are_described() -> None:
    for line in list_records():
        described = {word.rstrip(",.:") for word in describe_fields(line.split()[0]).split()}
        wanted = {line.split()[1]} if " " in line else {field.name for field in fields(find_record(line)[0])}
        assert wanted - described == set()


def test_the_fields_of_a_commands_json_fill_no_more_than_a_quarter_of_its_help(cairn: Cairn) -> None:
    assert 4 * len(describe_fields("train").splitlines()) < len(helped(cairn, "train").splitlines())


@pytest.mark.parametrize("verb", ["attempts", "models", "sql"])
def test_the_help_of_a_verb_names_the_fields_of_its_json(cairn: Cairn, verb: str) -> None:
    assert describe_fields(verb) in helped(cairn, verb).partition("Examples:")[0]


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_a_verb_name_options_that_it_has(cairn: Cairn, verb: str) -> None:
    text = helped(cairn, verb)
    options = {word for line in read_examples(verb) for word in re.findall(r"(?<=\s)--[a-z-]+", line)}
    assert {option for option in options if option not in text.partition("Examples:")[0]} == set()


def test_no_example_is_wider_than_a_terminal() -> None:
    assert [line for verb in VERBS for line in read_examples(verb) if len(line) > 78] == []


def test_the_list_of_verbs_says_where_to_start(cairn: Cairn) -> None:
    text = helped(cairn)
    assert "Start here:\n  cairn train " in text and all(verb in text for verb in VERBS)


def test_training_is_listed_before_everything_else(cairn: Cairn) -> None:
    text = helped(cairn)
    places = [text.index(title) for title in ("─ Train ─", "─ Read runs ─", "─ Models ─", "─ Store and machine ─")]
    assert places == sorted(places)


def test_the_version_is_printed(cairn: Cairn) -> None:
    assert cairn("--version").out.startswith("cairn ")
