"""SECURITY.md names a test for each promise: each is there, and no room of tests/security is left out."""

from pathlib import Path

from tests.house.named_tests import absent_tests, named_tests


def rows(root: Path) -> list[str]:
    """Return the lines of the table of promises, without its heading."""
    table = (root / "SECURITY.md").read_text(encoding="utf-8").split("| promise | test |\n|---|---|\n", 1)[1]
    return table.splitlines()


def test_every_test_that_a_promise_names_exists(root: Path) -> None:
    assert len(rows(root)) > 30 and absent_tests(root, named_tests("\n".join(rows(root)))) == []


def test_every_promise_names_a_test(root: Path) -> None:
    assert [row for row in rows(root) if "::test_" not in row.rpartition(" | ")[2]] == []


def test_every_file_of_the_security_tests_shows_a_promise(root: Path) -> None:
    named = {path for path, _ in named_tests("\n".join(rows(root)))}
    files = {str(path.relative_to(root)) for path in (root / "tests" / "security").glob("test_*.py")}
    assert files - named == set()
