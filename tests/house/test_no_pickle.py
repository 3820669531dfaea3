"""No pickle, in no byte: not in what is shipped, not in what is stored, not in what the orchestrator is given to keep.

Here the bytes speak, those of the wheel and those of a checkpoint.
"""

import ast
import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect import task
from prefect.cache_policies import NO_CACHE

from cairn.storage.stores.local_store import LocalStore
from tests.house.packages import folder_of
from tests.storage.builders import RUN, run_with_commits

pytestmark = pytest.mark.xdist_group("modules")  # they are parsed once for all tests

PICKLING = re.compile(
    rb"\b(?:import|from)\s+(?:\w+,\s*)*_?(?:c?pickle|cloudpickle|dill|joblib|shelve|marshal)\b"
    rb"|\btorch\s*\.\s*(?:jit\.)?(?:save|load)\s*\(|[=(,]\s*torch\s*\.\s*(?:save|load)\b|\bnp\s*\.\s*load\s*\(|allow_pickle\s*=\s*True"
    rb"|\bweights_only\b|\b__reduce(?:_ex)?__\b|\bserializer\s*=\s*[\"']pickle"
)
OPCODES = {code.code.encode("latin-1"): code.name for code in pickletools.opcodes}
# What protocol 2 and later begin with; older ones end in a dot after opcodes that are text, which JSON is not.
BEGINNINGS = tuple(pickle.PROTO + bytes([protocol]) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1))


def shipped(root: Path, project: Mapping[str, Any], packages: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """What the wheel holds: every module of the listed packages, and what they declare as data."""
    for package in packages:
        for path in sorted((root / folder_of(package)).glob("*.py")):
            yield str(path.relative_to(root)), path.read_bytes()
    declared = project["tool"]["setuptools"].get("package-data", {})
    for package, patterns in declared.items():
        for pattern in patterns:
            for path in filter(Path.is_file, sorted((root / folder_of(package)).glob(pattern))):
                yield str(path.relative_to(root)), path.read_bytes()


@pytest.fixture(scope="module")
def wheel(root: Path, project: dict[str, Any], packages: tuple[str, ...]) -> zipfile.ZipFile:
    """The wheel as it would be, in memory: building a real one would need the network."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in shipped(root, project, packages):
            archive.writestr(name, data)
    return zipfile.ZipFile(buffer)


def is_pickled(data: bytes) -> bool:
    """Whether these bytes can be read as a pickle of any protocol; nothing of it is executed."""
    if not data or data[:1] not in OPCODES or not data.rstrip().endswith(pickle.STOP):
        return data.startswith(BEGINNINGS)
    try:
        for _ in pickletools.genops(data):
            pass
    except Exception:  # pickletools raises whatever its readers do
        return data.startswith(BEGINNINGS)
    return True


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_judge_knows_a_pickle_of_every_protocol(protocol: int) -> None:
    assert is_pickled(pickle.dumps({"weights": [1.0, 2.0]}, protocol))


@pytest.mark.parametrize(
    "line",
    [
        b"import pickle",
        b"import os, pickle",
        b"hook = torch.load",
        b"from cloudpickle import dumps",
        b"torch.save(state, path)",
        b"np.load(p, allow_pickle=True)",
    ],
)
def test_the_judge_knows_code_that_pickles(line: bytes) -> None:
    assert PICKLING.search(line)


def test_no_file_of_the_wheel_pickles_or_is_one(wheel: zipfile.ZipFile) -> None:
    files = {name: wheel.read(name) for name in wheel.namelist()}
    assert len(files) > 100
    assert {name: found[0] for name, data in files.items() if (found := PICKLING.search(data))} == {}
    assert [name for name, data in files.items() if is_pickled(data)] == []


def test_no_byte_of_a_run_and_its_checkpoints_is_a_pickle(tmp_path: Path) -> None:
    run_with_commits(LocalStore(tmp_path), 5, 10)
    files = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(name.endswith(".safetensors") for name in files) and (tmp_path / "runs" / RUN / "log").is_dir()
    assert [name for name, data in files.items() if is_pickled(data)] == []
    assert [name for name, data in files.items() if data.startswith(b"PK")] == [], "torch.save writes a zip"


def test_the_orchestrator_is_given_no_result_and_no_parameter_to_pickle(modules: Mapping[str, ast.Module]) -> None:
    keeping = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Name)
        and decorator.func.id in ("flow", "task")
        and not says_nothing_is_kept(decorator)
    ]
    assert keeping == [], "Prefect pickles what it keeps, and a person's settings may make it keep by default"


def says_nothing_is_kept(decorator: ast.Call) -> bool:
    """Whether no result is kept, and no cache policy is named."""
    said = {keyword.arg: ast.unparse(keyword.value) for keyword in decorator.keywords}
    return said.get("persist_result") == "False" and "cache_policy" not in said


def test_a_task_whose_result_is_not_kept_does_not_hash_its_parameters_either() -> None:
    @task(persist_result=False)
    def step() -> None:
        """Do nothing."""

    assert step.cache_policy == NO_CACHE, "the hash pickles what is no JSON"
