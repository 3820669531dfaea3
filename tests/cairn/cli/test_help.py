"""What a person reads in a terminal: helps, keys, tables of 80 columns; JSON has the fields that a help names."""

import json
import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from cairn.cli.app import app, describe_fields, find_record, list_records, read_examples
from cairn.storage.stores.local_store import LocalStore
from tests.commands import Cairn, Ended, run_here
from tests.fabricated_run import FabricatedRun, store_bard

VERBS = sorted(name for name in app if not name.startswith("-"))


@cache
def helped(*arguments: str) -> str:
    """What a command's help says; each is asked for once."""
    ended = run_here((*arguments, "--help"), Path.cwd(), {})
    assert ended.code == 0
    return ended.out


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_ends_with_an_example_of_it(verb: str) -> None:
    lines = helped(verb).rstrip().splitlines()
    assert any(line.startswith(f"  cairn {verb}") for line in lines[lines.index("Examples:") :])


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "completion"])
def test_every_verb_can_print_json_and_be_told_its_store(verb: str) -> None:
    options = ("--json",) if verb in ("config", "init") else ("--json", "--store")  # keys and texts are of no store
    assert all(option in helped(verb) for option in options)


def test_the_fields_of_every_record_are_described() -> None:
    for line in list_records():
        described = {word.rstrip(",.:") for word in describe_fields(line.split()[0]).split()}
        wanted = {line.split()[1]} if " " in line else {field.name for field in fields(find_record(line)[0])}
        assert wanted - described == set()


def test_the_fields_of_a_commands_json_fill_no_more_than_a_quarter_of_its_help() -> None:
    assert 4 * len(describe_fields("train").splitlines()) < len(helped("train").splitlines())


@pytest.mark.parametrize("verb", ["attempts", "models", "sql"])
def test_the_help_of_a_verb_names_the_fields_of_its_json(verb: str) -> None:
    assert describe_fields(verb) in helped(verb).partition("Examples:")[0]


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_a_verb_name_options_that_it_has(verb: str) -> None:
    text = helped(verb)
    options = {word for line in read_examples(verb) for word in re.findall(r"(?<=\s)--[a-z-]+", line)}
    assert {option for option in options if option not in text.partition("Examples:")[0]} == set()


def test_no_example_is_wider_than_a_terminal() -> None:
    assert [line for verb in VERBS for line in read_examples(verb) if len(line) > 78] == []


def test_the_list_of_verbs_says_where_to_start() -> None:
    text = helped()
    assert "Start here:\n  cairn train " in text and all(verb in text for verb in VERBS)


def test_training_is_listed_before_everything_else() -> None:
    text = helped()
    places = [text.index(title) for title in ("─ Train ─", "─ Read runs ─", "─ Models ─", "─ Store and machine ─")]
    assert places == sorted(places)


def test_the_version_is_printed(cairn: Cairn) -> None:
    assert cairn("--version").out.startswith("cairn ")


Shown = Callable[[str, int], Ended]
TABLES = (
    *(f"{verb} bard" for verb in ("status", "explain", "attempts", "checkpoints", "evaluations", "log", "diagnose")),
    *("runs", "models", "models --history", "sweep bard --dry-run", "config", "config training.threads", "sql"),
    "simulate --days 1 --devices 64",
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """What a command line prints in so many columns; each is run once."""
    folder = tmp_path_factory.mktemp("narrow")
    store_bard(LocalStore(folder / "store"))

    @cache
    def show(line: str, columns: int) -> Ended:
        return run_here(tuple(line.split()), folder, {"COLUMNS": str(columns)})

    return show


def words(text: str) -> set[str]:
    return {word.strip(":;,") for word in re.findall(r"\S+", text)}


@pytest.mark.parametrize("line", TABLES)
def test_nothing_is_wider_than_80_columns(shown: Shown, line: str) -> None:
    ended = shown(line, 80)
    assert ended.code == 0 and len(ended.out.splitlines()) >= 2, ended
    assert [line for line in ended.out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("line", TABLES)
def test_no_word_is_broken_at_80_columns(shown: Shown, line: str) -> None:
    assert words(shown(line, 500).out) - words(shown(line, 80).out) - {"–"} == set()


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


@pytest.mark.parametrize("line", ["report bard", "note bard"])  # the others: test_help
def test_people_get_lines_they_can_read(bard: FabricatedRun, cairn: Cairn, line: str) -> None:
    ended = cairn(*line.split())
    assert ended.code == 0 and len(ended.out.splitlines()) >= 2


def test_the_log_is_printed_entry_by_entry_as_it_lies_in_the_store(
    bard: FabricatedRun, cairn: Cairn, tmp_path: Path
) -> None:
    entries = json.loads(cairn("log", "bard", "--json").out)
    newest_first = sorted((tmp_path / "store" / "runs" / "bard" / "log").iterdir(), reverse=True)
    assert entries == [json.loads(path.read_text()) for path in newest_first]


@pytest.mark.unsound_log
def test_a_changed_entry_is_an_integrity_error(bard: FabricatedRun, cairn: Cairn, tmp_path: Path) -> None:
    entry = tmp_path / "store" / "runs" / "bard" / "log" / "9999999997.json"
    entry.write_text(entry.read_text().replace("here", "there"))
    assert cairn("status", "bard").code == 5


def test_an_error_shows_its_traceback_when_asked_to(cairn: Cairn) -> None:
    assert "Traceback" in cairn("status", "nobody", CAIRN_DEBUG="1").err


OF_A_RUN = ("status", "explain", "report", "attempts", "checkpoints", "evaluations", "log", "note", "diagnose", "sweep")
LINES = {line: line.split() for line in ("runs", "models", "models --history", "config")}
LINES["simulate"] = ["simulate", "--days", "1", "--devices", "64"]


@pytest.mark.parametrize("line", [*LINES, *OF_A_RUN])
def test_a_command_prints_the_fields_of_the_record_that_the_page_names(
    bard: FabricatedRun, cairn: Cairn, line: str
) -> None:
    record, is_list = find_record(line)
    ended = cairn(*LINES.get(line, [line, "bard"]), "--json")
    printed = json.loads(ended.out)
    assert (ended.code, ended.err, isinstance(printed, list)) == (0, "", is_list)
    assert set(printed[0] if is_list else printed) == {field.name for field in fields(record)}
