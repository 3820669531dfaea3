import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([0-9][A-Za-z0-9.]*)$")
# A GPU build of torch brings its own libraries and pins them itself.
PINNED_BY_TORCH = ("nvidia-", "cuda-", "triton")


@pytest.fixture(scope="module")
def lines(root: Path) -> list[str]:
    text = (root / "constraints.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def pins(lines: list[str]) -> dict[str, str]:
    return {str(canonicalize_name(line.partition("==")[0])): line.partition("==")[2] for line in lines}


@pytest.fixture(scope="module")
def installed_closure(project: dict[str, Any]) -> dict[str, str]:
    """Distribution → version of everything the project and its dev extra pull in here, without local build tags."""
    declared = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["dev"]]
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in declared]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = str(canonicalize_name(requirement.name))
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                found |= installed(name)
                waiting += [(Requirement(text), wanted) for text in (requires(name) or [] if name in found else [])]
    return found


def installed(name: str) -> dict[str, str]:
    try:
        return {name: version(name).partition("+")[0]}
    except PackageNotFoundError:
        return {}


def test_constraints_are_exact_pins_and_name_no_host_or_path(lines: list[str]) -> None:
    assert [line for line in lines if not PIN.match(line)] == []


def test_constraints_pin_everything_the_project_pulls_in(
    installed_closure: dict[str, str], pins: dict[str, str]
) -> None:
    unpinned = installed_closure.keys() - pins.keys()
    assert {name for name in unpinned if not name.startswith(PINNED_BY_TORCH)} == set()


def test_the_environment_is_the_one_the_constraints_describe(
    installed_closure: dict[str, str], pins: dict[str, str]
) -> None:
    both = installed_closure.keys() & pins.keys()
    differing = {name: (installed_closure[name], pins[name]) for name in both if installed_closure[name] != pins[name]}
    assert differing == {}, "run `make .venv`, or renew constraints.txt"
