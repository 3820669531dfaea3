import functools
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

IMPORTS = """
import importlib, pkgutil, sys, threading

def import_all(name):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)

for name in sys.argv[1:]:
    if name == "the help of every command":
        import cairn.cli.command
        from cairn.cli.app import find_record, list_records
        [*map(find_record, list_records())]
    elif name == "a configuration":
        import cairn.model.configuration.training
    else:
        import_all(name)
    print(threading.active_count(), *sys.modules)
"""
"""Import each of these, and say after each how many threads there are and what is imported by then."""
FROM_LIGHT_TO_HEAVY = ("cairn.storage", "a configuration", "cairn.reports", "the help of every command")
pytestmark = pytest.mark.xdist_group("imports")  # each package is imported once for all tests


@functools.cache
def imported(root: Path, *names: str) -> dict[str, tuple[int, frozenset[str]]]:
    """Import in a new process, one after the other; returns for each the threads, and all that is imported by then."""
    lines = printed_by(IMPORTS, root, *names).splitlines()
    assert len(lines) == len(names), f"something was printed: {lines}"
    found = [line.split() for line in lines]
    return {name: (int(threads), frozenset(loaded)) for name, (threads, *loaded) in zip(names, found, strict=True)}


def printed_by(code: str, root: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    finished = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=240)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def imported_with(name: str, root: Path) -> tuple[int, frozenset[str]]:
    return imported(root, *(FROM_LIGHT_TO_HEAVY if name in FROM_LIGHT_TO_HEAVY else [name]))[name]


def beside(package: str) -> tuple[str, ...]:
    """Every other package, and the folders of `cairn`."""
    names = ("cli", "flows", "model", "operations", "reports", "storage", "tasks", "ui")
    return tuple(f"cairn.{name}" for name in names if name != package)


@pytest.mark.parametrize(
    ("name", "unwanted"),
    [
        pytest.param("cairn.storage", ("torch", "prefect", *beside("storage")), id="storage"),
        pytest.param("cairn.model", ("prefect", "fsspec", "s3fs", *beside("model")), id="model"),
        pytest.param("cairn.reports", ("torch", "prefect", "cairn.flows", "cairn.cli", "cairn.ui"), id="reports"),
        pytest.param("a configuration", ("torch", "prefect"), id="to read a configuration"),
        pytest.param("the help of every command", ("torch", "prefect"), id="the help of every command"),
    ],
)
def test_the_lower_packages_and_what_is_only_read_import_nothing_above_or_beside_them(
    name: str, unwanted: tuple[str, ...], root: Path
) -> None:
    # torch imports fsspec by itself where it is installed; what model does is the import linter's to hold.
    found = set(unwanted) & imported_with(name, root)[1]
    assert found - ({"fsspec"} if name == "cairn.model" else set()) == set()


@pytest.mark.parametrize("package", ["storage", "model"])
def test_importing_a_package_prints_nothing_and_starts_no_thread(package: str, root: Path) -> None:
    assert imported_with(f"cairn.{package}", root)[0] == 1


@pytest.fixture
def tests(tracked: Mapping[str, str]) -> Mapping[str, str]:
    """Path → text of the tests and of what they share."""
    return {path: text for path, text in tracked.items() if path.startswith("tests/") and path.endswith(".py")}


def test_no_test_imports_another_test_or_a_conftest(tests: Mapping[str, str]) -> None:
    imports = re.compile(r"^\s*(?:from|import) (tests\.\S*\b(?:test_\w+|conftest))\b", re.MULTILINE)
    assert {path: names for path, text in tests.items() if (names := imports.findall(text))} == {}


def test_no_test_and_no_fixture_takes_or_returns_any(tests: Mapping[str, str]) -> None:
    """What tests share has a type that a reader can look up; keyword arguments that are passed on may be anything."""
    signatures = re.compile(
        r"^(?:@pytest\.fixture[^\n]*\ndef \w+|def test_\w+)\((.*?)\) -> (.*?):$", re.MULTILINE | re.DOTALL
    )
    taken, returned = re.compile(r"(?<![*\w])\w+: Any\b"), re.compile(r"^(?:Iterator\[)?Any\b")
    found = {
        path: names
        for path, text in tests.items()
        for takes, returns in signatures.findall(text)
        if (names := taken.findall(takes) + returned.findall(returns))
    }
    assert found == {}


OLD = "deployments|flows|model|reports|storage|tasks"
OLD_IMPORT = re.compile(rf"^\s*(?:from|import) (?:{OLD})\b", re.MULTILINE)
OLD_DOTTED = re.compile(rf"(?<![\w./-])(?:{OLD})(?:\.[a-z_]+){{2,}}")


def old_names(root: Path, text: str) -> list[str]:
    """Imports of an old name, and dotted names of a module that begin with one."""
    modules = [root.joinpath(*found.split(".")[:2]) for found in OLD_DOTTED.findall(text)]
    named = [str(path) for path in modules if path.is_dir() or path.with_suffix(".py").is_file()]
    return OLD_IMPORT.findall(text) + named


def test_no_file_imports_or_names_a_package_by_what_stands_at_the_top_level(
    root: Path, tracked: Mapping[str, str]
) -> None:
    texts = {path: text for path, text in tracked.items() if path.endswith((".py", ".yaml", ".sh"))}
    assert {path: names for path, text in texts.items() if (names := old_names(root, text))} == {}


def test_only_cairn_is_importable_outside_the_checkouts_root(tmp_path: Path) -> None:
    names = OLD.split("|")
    code = (
        f"from importlib.util import find_spec; print(*[n for n in {names} if find_spec(n)], bool(find_spec('cairn')))"
    )
    assert printed_by(code, tmp_path) == "True"
