"""The source tree as the house tests see it: packages as pyproject.toml lists them, and their parsed modules."""

import ast
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.house.packages import folder_of

TEXT = frozenset(("", ".py", ".toml", ".txt", ".md", ".yaml", ".yml", ".sh", ".j2", ".html", ".js", ".json", ".ipynb"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository root."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tracked(root: Path) -> Mapping[str, str]:
    """Path from the root → text of every text file that git tracks here."""
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of tracked files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name and Path(name).suffix in TEXT and (root / name).is_file()]
    return {name: (root / name).read_text(encoding="utf-8") for name in names}


@pytest.fixture(scope="session")
def project(root: Path) -> dict[str, Any]:
    """pyproject.toml, parsed."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def packages(project: dict[str, Any]) -> tuple[str, ...]:
    """Every package of Cairn's own code that is shipped; `deployments` is files beside them."""
    listed = project["tool"]["setuptools"]["packages"]
    return tuple(package for package in listed if not package.startswith("cairn.deployments"))


@pytest.fixture(scope="session")
def modules(root: Path, packages: tuple[str, ...]) -> Mapping[str, ast.Module]:
    """Path from the root → syntax tree, for every shipped module."""
    top_level = sorted({folder_of(package).parts[0] for package in packages})
    paths = [path for folder in top_level for path in sorted((root / folder).rglob("*.py"))]
    return {str(path.relative_to(root)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
