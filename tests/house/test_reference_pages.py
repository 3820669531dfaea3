"""The pages that `make docs` writes are those of this code."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from cairn.cli.app import app, list_records
from docs.generate.reference_pages import reference_pages


@pytest.fixture(scope="module")
def pages() -> Mapping[str, str]:
    """What the code says now."""
    return reference_pages()


@pytest.mark.parametrize("page", ["commands.md", "configuration.md", "json.md", "log.md", "sql.md"])
def test_a_page_of_the_reference_is_what_make_docs_writes(root: Path, pages: Mapping[str, str], page: str) -> None:
    assert (root / "docs" / "reference" / page).read_text(encoding="utf-8") == pages[page]


def test_every_command_that_prints_a_record_is_on_the_page_on_json() -> None:
    assert {line.split()[0] for line in list_records()} == {name for name in app if not name.startswith("-")} - {"sql"}
