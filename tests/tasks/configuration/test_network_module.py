"""What a module of one's own may be: read and refused by its text alone, of which nothing runs."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from cairn.model.configuration.network import ModelConfig
from cairn.storage.stores.codec import sha256
from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.configuration.network_module import module_versions, read_module
from cairn.tasks.errors import InvalidConfiguration

NET = """
raise RuntimeError("it runs")
import math, torch.nn as nn
from dataclasses import dataclass
import numpy
from parts import Layer
from . import more
try:
    import flash_attn
except ImportError:
    flash_attn = None


def build(vocab_size: int, width: int, name: str = "plain", rate: float = 0.5, kind: Literal["a", "b"] = "a",
          size: Optional[tuple[int, float]] = None, deep: bool = math.pi > 3, sizes: list[int] = [1, 2],
          pair: tuple[int, ...] = (), *, top: int | None = None
):
    import transformers
    return Layer(width)


class Net(nn.Module):
    def __init__(self, width: int): ...


class Bare(nn.Module):
    pass
"""
FILES = {
    "net.py": NET,
    "parts.py": "import more\n",
    "more.py": "",
}
WIDE = {"module": "net.py:build", "width": 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def read(folder: Path, **model: Any) -> ModelConfig:
    return read_module(ModelConfig.model_validate(model), folder)[0]


def test_a_module_is_its_file_and_those_that_it_imports_and_nothing_of_them_runs(folder: Path) -> None:
    (folder / "other.py").write_text("")
    found = read(folder, **WIDE)
    assert found.files == {name: sha256(text.encode()) for name, text in FILES.items()}


def test_a_module_is_known_by_its_name_wherever_its_folder_is(folder: Path) -> None:
    assert read(folder.parent, **{**WIDE, "module": f"{folder.name}/net.py:build"}) == read(folder, **WIDE)


def test_receipts_name_the_files_and_the_versions_of_the_packages(folder: Path) -> None:
    versions = module_versions(read(folder, **WIDE, imports=["yaml", "math"]))
    assert versions == {**{name: sha256(text.encode()) for name, text in FILES.items()}, "yaml": version("pyyaml")}
    with pytest.raises(InvalidConfiguration, match="'gone': it is not installed on this machine"):
        module_versions(read(folder, **WIDE, imports=["gone"]))


def test_arguments_are_those_given_and_the_literal_defaults(folder: Path) -> None:
    found = read(folder, **WIDE, rate=1, pair=[3, 4], size=[1, 2], top=5, block_size=9)
    assert found.block_size == 9
    assert found.arguments == {
        "width": 8, "name": "plain", "rate": 1.0, "sizes": [1, 2], "pair": (3, 4), "top": 5,
        "kind": "a", "size": (1, 2.0),
    }  # fmt: skip


def test_a_default_that_is_none_of_its_type_is_left_to_the_file(folder: Path) -> None:
    (folder / "net.py").write_text(
        "def build(a: int = 'x', b: int = 10**3, c: int = {1}, d: int = 1j, e: int = 2): ..."
    )
    assert read(folder, module="net.py:build").arguments == {"e": 2}


def test_a_configuration_says_of_a_module_what_was_written_and_of_another_network_nothing_of_modules(
    folder: Path,
) -> None:
    document = read(folder, **WIDE).model_dump(mode="json")
    assert ModelConfig.model_validate(document).model_dump(mode="json") == document
    assert "n_layer" not in document and document["width"] == 8
    assert not ModelConfig().model_dump().keys() & {"module", "imports", "files", "arguments"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"module": "gone.py:build"}, "gone.py cannot be read: No such file"),
        ({"width": 8, "kind": "c"}, "must be kind: Literal['a', 'b']"),
        ({"width": 8, "size": [1, 2, 3]}, "must be size: Optional[tuple[int, float]]"),
        ({"module": "net.py"}, "rule: a Python file and the name of a function or class"),
        ({"module": "net:build"}, "rule: a Python file and the name"),
        ({"module": "net.py:"}, "rule: a Python file and the name"),
        ({"module": "net.py:other"}, "defines no other"),
        ({"module": "net.py:Layer"}, "defines no Layer"),
        ({"module": "net.py:Bare"}, "class Bare has no __init__ of its own"),
        ({}, "model.width: missing; net.py:build takes width: int"),
        ({"module": "net.py:Net"}, "model.width: missing"),
        ({"width": "8"}, "model.width = '8': must be width: int"),
        ({"width": 8.5}, "must be width: int"),
        ({"width": True}, "must be width: int"),
        ({"width": 10**30}, "must be width: int"),
        ({"width": 8, "rate": float("nan")}, "must be rate: float"),
        ({"width": 8, "rate": float("inf")}, "must be rate: float"),
        ({"width": {"a": 1}}, "must be width: int"),
        ({"width": 8, "rate": "x"}, "must be rate: float"),
        ({"width": 8, "sizes": [1, "2"]}, "must be sizes: list[int]"),
        ({"width": 8, "top": 1.5}, "must be top: int | None"),
        ({"width": 8, "pair": 3}, "must be pair: tuple[int, ...]"),
        ({"width": 8, "widht": 9}, "model.widht = 9: net.py:build has no such argument; it takes vocab_size: int"),
        ({"width": 8, "self": 1}, "has no such argument"),
        ({"module": "net.py:Net", "width": 1, "self": 1}, "it takes width: int"),
    ],
)
def test_what_cannot_be_called_is_refused_with_the_names(folder: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        read(folder, **{"module": "net.py:build", **given})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build(*sizes: int): ...", "takes *, ** or / arguments"),
        ("def build(**sizes: int): ...", "takes *, ** or / arguments"),
        ("def build(width: int, /): ...", "takes *, ** or / arguments"),
        ("def build(width): ...", "its argument width has no type"),
        ("def build(width=8): ...", "has no type"),
        ("def build(net: Module): ...", "its argument net: Module has no type that a configuration has"),
        ("def build(width: list['int']): ...", "has no type that a configuration has"),
        ("def build(width: Literal[print('it runs')]): ...", "has no type that a configuration has"),
        ("def build(width: tuple['int', ...]): ...", "has no type that a configuration has"),
        ("def build(width: Optional): ...", "has no type that a configuration has"),
        ("def build(width: print('it runs')): ...", "has no type that a configuration has"),
        ("def build(module: str): ...", "its argument module has the name of a key of [model]"),
        ("async def build(): ...", "defines no build"),
        ("build = lambda: 1", "defines no build"),
        ("def build(:", "line 1: "),
        ("\0", "null bytes"),
        ("import einops\ndef build(): ...", "line 1: imports einops; rule: torch, numpy"),
        ("from einops.layers import x\ndef build(): ...", "imports einops"),
        ("import __main__\ndef build(): ...", "imports __main__"),
        ("from .gone import x\ndef build(): ...", "no gone.py lies beside it"),
        ("from . import gone\ndef build(): ...", "no gone.py lies beside it"),
        ("from more.gone import x\ndef build(): ...", "nothing named gone is within more.py"),
        ("from ..above import x\ndef build(): ...", "imports from a folder above"),
        ("import torch\ndef build(): ...", "torch.py lies beside it and has a package's name; rename it"),
        ("import linked\ndef build(): ...", "linked.py is a link"),
        ("import folder\ndef build(): ...", "imports folder"),
        ("import grün\ndef build(): ...", "letters, digits and '_'"),
    ],
)  # fmt: skip
def test_a_file_that_a_run_cannot_be_made_of_is_refused(folder: Path, text: str, said: str) -> None:
    for name in ("torch", "grün", "folder/__init__"):
        (folder / f"{name}.py").parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text("")
    (folder / "linked.py").symlink_to(folder / "more.py")
    (folder / "net.py").write_text(text)
    with pytest.raises(InvalidConfiguration) as refused:
        read(folder, module="net.py:build")
    assert said in str(refused.value)


def test_a_package_that_is_named_may_be_imported_and_only_by_a_module(folder: Path) -> None:
    (folder / "net.py").write_text("import einops\ndef build(): ...")
    assert read(folder, module="net.py:build", imports=["einops"]).imports == ("einops",)
    with pytest.raises(ValueError, match="set module, or leave it out"):
        ModelConfig(imports=("einops",))


def test_files_that_import_each_other_are_read_once_and_too_many_are_refused(folder: Path) -> None:
    (folder / "more.py").write_text("import net, parts")
    assert len(read(folder, **WIDE).files or {}) == 3
    (folder / "more.py").write_text("\n".join(f"import part_{number}" for number in range(60)))
    for number in range(60):
        (folder / f"part_{number}.py").write_text("")
    with pytest.raises(InvalidConfiguration, match="at most 50 files"):
        read(folder, **WIDE)


@pytest.mark.parametrize(
    "key",
    [
        *("training.init_from=weights", "training.compile=true", "training.mask_documents=true", "training.z_loss=0.1"),
        *("training.kernels=fused", "training.parallel=fsdp", "training.optimizer=muon", "training.lora={rank = 2}"),
        "data.loss_on=answers",
    ],
)
def test_what_only_cairns_networks_can_is_refused_with_its_key(folder: Path, key: str) -> None:
    document = {"data": {"sources": ["a.jsonl"]}, "training": {"steps": 1}, "model": WIDE}
    with pytest.raises(InvalidConfiguration, match=f"{key.partition('=')[0]}.*only for the networks that Cairn has"):
        parse_configuration(document, overrides=[key], environment={}, name="run.toml", folder=folder)
