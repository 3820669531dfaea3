"""Numbers, lists and pages of the reference are those of the code."""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from cairn.cli.app import app, list_records
from cairn.cli.command import run_command
from cairn.reports.queries.run_tables import ROWS
from cairn.tasks.configuration.key_reference import keys_by_name
from cairn.tasks.policy.curve_verdict import VerdictKind
from cairn.ui import live_page
from docs.generate.reference_pages import reference_pages

VERBS = sorted(name for name in app if not name.startswith("-"))
DEFAULT = re.compile(r"^ {4}(\w+): (?:[^\n]|\n {8})*?\[(\d+)\]\.?$", re.MULTILINE)


def helped(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run_command([verb, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_a_default_in_a_help_is_the_parameters_default(verb: str) -> None:
    function = app[verb].default_command
    assert callable(function)
    given = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    said = {name: int(number) for name, number in DEFAULT.findall(inspect.getdoc(function) or "")}
    assert said == {name: given[name] for name in said}


def test_the_defaults_in_helps_are_found() -> None:
    assert dict(DEFAULT.findall(inspect.getdoc(app["plot"].default_command) or "")) == {
        "width": "1200",
        "height": "900",
    }


def test_the_help_of_diagnose_names_every_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert {kind.value for kind in VerdictKind} <= set(re.findall(r"[a-z-]+", helped("diagnose", capsys)))


def test_the_help_of_sql_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert ROWS.keys() <= set(re.findall(r"\w+", helped("sql", capsys)))


def test_the_page_about_the_live_page_has_its_share_of_the_time(root: Path) -> None:
    page, share = (root / "docs/how-to/look-at-runs.md").read_text(encoding="utf-8"), f"one second in {live_page._REST}"
    assert share in " ".join(page.split()) and share in str(live_page.__doc__)


def test_the_page_about_machines_has_their_defaults(root: Path) -> None:
    page, keys = (root / "deployments/multi_node.md").read_text(encoding="utf-8"), keys_by_name()
    assert f"`machines.wait_seconds` ({float(keys['machines.wait_seconds'].default):g})" in page
    waits = int(keys["budgets.too-few-machines.retries"].default)
    assert f"`budgets.too-few-machines` ({waits:,} since" in " ".join(page.split())


@pytest.fixture(scope="module")
def pages() -> Mapping[str, str]:
    """What the code says now."""
    return reference_pages()


@pytest.mark.parametrize("page", ["commands.md", "configuration.md", "json.md", "log.md", "sql.md"])
def test_a_page_of_the_reference_is_what_make_docs_writes(root: Path, pages: Mapping[str, str], page: str) -> None:
    assert (root / "docs" / "reference" / page).read_text(encoding="utf-8") == pages[page]


def test_every_command_that_prints_a_record_is_on_the_page_on_json() -> None:
    assert {line.split()[0] for line in list_records()} == {name for name in app if not name.startswith("-")} - {"sql"}
