"""Every command line in the documents is one that the real parsers accept; those that only ask are run.

`tests/crash/test_tutorial.py` runs those of the tutorial.
"""

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError, MissingArgumentError

from cairn.cli.command import app
from cairn.tasks.configuration.configuration_source import expand_set, parse_configuration
from cairn.tasks.configuration.key_reference import keys_by_name
from cairn.tasks.errors import InvalidConfiguration
from tests.commands import run_here
from tests.documented_commands import (
    DocumentedCommand,
    documented_commands,
    documented_configurations,
    documented_module,
)

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deployments").rglob("*.md")])
BASE: dict[str, Any] = {"data": {"sources": ["text.txt"]}, "training": {"steps": 10}}
ASKING = ("config", "models", "runs", "sql")
"""Verbs that answer without a run."""
SECTIONS = "data|model|training|checkpoint|evaluation|early_stop|promotion|exporters|notify"
KEY = re.compile(rf"`((?:{SECTIONS})\.[a-z_.]+)[` =]")
FILES = (".py", ".safetensors")
VARIABLE = re.compile(r"\bCAIRN_[A-Z][A-Z_]*[A-Z]\b")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def commands(path: Path, program: str) -> list[DocumentedCommand]:
    found = documented_commands(read(path))
    return [command for command in found if command.words[0] == program]


def asks(command: DocumentedCommand) -> bool:
    """Whether it is a line of its own that answers from an empty store."""
    return command.words[1] in ASKING and not command.is_in_sentence and "--store" not in command.words


def showing(
    program: str, is_wanted: Callable[[DocumentedCommand], bool] = lambda command: True
) -> pytest.MarkDecorator:
    """Once for each document that shows such commands."""
    shown = [path for path in DOCUMENTS if any(map(is_wanted, commands(path, program)))]
    return pytest.mark.parametrize("path", shown, ids=name)


def problems(command: DocumentedCommand) -> Iterator[str]:
    try:
        _, bound, _ = app.parse_args(command.words[1:], exit_on_error=False, print_error=False)
        if not command.is_in_sentence:
            overrides = bound.arguments.get("set_", ())
            for run in expand_set("a-document", overrides):
                parse_configuration(BASE, overrides=run.overrides, environment=command.variables, name="a document")
    except (CycloptsError, InvalidConfiguration) as error:
        if not (command.is_in_sentence and isinstance(error, MissingArgumentError)):
            yield f"{command.text}: {error}"


@showing("cairn")
def test_the_command_line_parser_accepts_every_command_of_a_document(path: Path) -> None:
    assert [problem for command in commands(path, "cairn") for problem in problems(command)] == []


@showing("cairn", asks)
def test_a_command_that_only_asks_answers(path: Path, tmp_path: Path) -> None:
    asking = [command for command in commands(path, "cairn") if asks(command)]
    ended = {command.text: run_here(tuple(command.words[1:]), tmp_path, {}) for command in asking}
    assert {text: end.err for text, end in ended.items() if end.code != 0} == {}


@showing("prefect")
def test_every_deployment_that_a_document_runs_has_the_parameters_it_is_given(path: Path) -> None:
    runs = [command.words[3:] for command in commands(path, "prefect") if command.words[1:3] == ["deployment", "run"]]
    deployed = re.findall(r"^  - name: (\S+)", read(ROOT / "prefect.yaml"), re.MULTILINE)
    for deployment, *rest in runs:
        flow, _, deployment_name = deployment.partition("/")
        given = {word.partition("=")[0] for option, word in pairwise(rest) if option == "-p"}
        assert deployment_name in deployed and given <= parameters(flow), f"{deployment}: {given}"


def parameters(flow: str) -> set[str]:
    module = flow.replace("-", "_")
    tree = ast.parse(read(ROOT / "flows" / f"{module}.py"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == module)
    return {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if "```toml" in read(path)], ids=name)
def test_every_configuration_in_a_document_is_accepted(path: Path, tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text(documented_module(read(path)), encoding="utf-8")
    for block in documented_configurations(read(path)):
        sections = {**BASE, **tomllib.loads(block)}
        merged = {key: {**BASE[key], **value} if key in BASE else value for key, value in sections.items()}
        folder = tmp_path if "module" in sections.get("model", {}) else ROOT
        parse_configuration(merged, overrides=(), environment={}, name=name(path), folder=folder)


def test_every_configuration_key_that_a_document_names_is_there() -> None:
    known = set(keys_by_name())
    named = {(name(path), key) for path in DOCUMENTS for key in KEY.findall(read(path))}
    assert {(path, key) for path, key in named if key not in known and Path(key).suffix not in FILES} == set()


def test_every_variable_of_cairn_that_a_document_names_is_read_somewhere() -> None:
    programs = [
        path
        for folder in ("cairn", "flows", "tasks", "storage", "reports", "model")
        for path in (ROOT / folder).rglob("*.py")
    ]
    programs += [path for path in (ROOT / "deployments").rglob("*") if path.suffix in {".sh", ".yaml", ".sbatch"}]
    known = {found for path in programs for found in VARIABLE.findall(read(path))}
    known |= {f"CAIRN_{key.key.upper().replace('.', '__').replace('-', '_')}" for key in keys_by_name().values()}
    named = {found for path in DOCUMENTS for found in VARIABLE.findall(read(path))}
    assert {found for found in named - known if not found.startswith(("CAIRN_TEST_", "CAIRN_SIMULATOR_"))} == set()
