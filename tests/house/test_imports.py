import functools
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

IMPORT_ALL = """
import importlib, pkgutil, sys, threading
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print("threads", threading.active_count(), *sys.modules)
"""
pytestmark = pytest.mark.xdist_group("imports")  # each package is imported once for all tests


def printed_by(code: str, root: Path) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False, timeout=240
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


@functools.cache
def import_all(package: str, root: Path) -> tuple[int, frozenset[str]]:
    """Import every module of a package in a new process; returns how many threads there are, and what was imported."""
    first, threads, *loaded = printed_by(IMPORT_ALL.format(package=package), root).split()
    assert first == "threads", "something was printed"
    return int(threads), frozenset(loaded)


def beside(package: str) -> tuple[str, ...]:
    """Every other package, and the folders of `cairn`."""
    names = ("cli", "flows", "model", "operations", "reports", "storage", "tasks", "ui")
    return tuple(f"cairn.{name}" for name in names if name != package)


@pytest.mark.parametrize(
    ("package", "unwanted"),
    [
        pytest.param("storage", ("torch", "prefect", *beside("storage")), id="storage"),
        pytest.param("model", ("prefect", "fsspec", "s3fs", *beside("model")), id="model"),
        pytest.param("reports", ("torch", "prefect", "cairn.flows", "cairn.cli", "cairn.ui"), id="reports"),
    ],
)
def test_the_lower_packages_import_nothing_above_or_beside_them(
    package: str, unwanted: tuple[str, ...], root: Path
) -> None:
    # torch imports fsspec by itself where it is installed; what model does is the import linter's to hold.
    found = set(unwanted) & import_all(f"cairn.{package}", root)[1]
    assert found - ({"fsspec"} if package == "model" else set()) == set()


def test_reading_a_configuration_needs_neither_torch_nor_prefect(root: Path) -> None:
    found = "print(*sorted({'torch', 'prefect'} & set(sys.modules)))"
    assert printed_by(f"import sys, cairn.model.configuration.training; {found}", root) == ""


def test_no_command_needs_them_for_its_help(root: Path) -> None:
    records = "from cairn.cli.app import find_record, list_records; [*map(find_record, list_records())]"
    found = "print(*sorted({'torch', 'prefect'} & set(sys.modules)))"
    assert printed_by(f"import sys, cairn.cli.command; {records}; {found}", root) == ""


@pytest.mark.parametrize("package", ["storage", "model"])
def test_importing_a_package_prints_nothing_and_starts_no_thread(package: str, root: Path) -> None:
    assert import_all(f"cairn.{package}", root)[0] == 1


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
