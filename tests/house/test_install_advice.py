"""No advice names a package of an index: the name of one that is not there could be registered by anybody."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

INSTALL = re.compile(r"\b(?:pip3?|pipx|uv tool|uv pip|uv|conda|mamba) (?:install|add|inject|run)\b((?:\\\n|[^\n`])*)")
OPTION = re.compile(r"(?:-\S*|:all:|\\|&&)\Z")
HERE = re.compile(r"[\"']?\.(?:/|\\?\[|[\"',;.)]|\Z)|constraints/|[$]|in\Z")
HIDDEN = ("tests/house/test_install_advice.py",)


def named_packages(text: str) -> list[str]:
    """The first thing that each line of advice installs, where it is not a folder or a file of hashes."""
    found = []
    for given in INSTALL.findall(text):
        words = [word for word in given.split() if not OPTION.match(word)]
        found += [word for word in words[:1] if not HERE.match(word)]
    return found


def test_no_text_tells_to_install_a_package_by_its_name(tracked: Mapping[str, str]) -> None:
    named = {path: named_packages(text) for path, text in tracked.items() if path not in HIDDEN}
    assert len(named) > 500 and {path: names for path, names in named.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pip install 'cairn-train[ui]'", ["'cairn-train[ui]'"]),
        ("`pip install cairn-train` installs it", ["cairn-train"]),
        ("python -m pip install --upgrade uv, in any", ["uv,"]),
        ("pipx inject cairn plotly", ["cairn"]),
        ("pipx install .          # or uv tool install ., or pip install . in an environment of yours", []),
        ("`pip install '.[otlp]'` in Cairn's folder", []),
        ("RUN pip install --require-hashes \\\n    --requirement constraints/run.txt", []),
    ],
)
def test_advice_is_read_as_a_shell_would(text: str, named: list[str]) -> None:
    assert named_packages(text) == named


def test_everything_that_readme_promises_is_installed_without_an_extra(root: Path, project: dict[str, Any]) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    needed = {re.split(r"[^a-z0-9-]", name)[0] for name in project["project"]["dependencies"]}
    assert "cairn ui" in readme and "plotly" in needed
    assert "ui" not in project["project"]["optional-dependencies"]
