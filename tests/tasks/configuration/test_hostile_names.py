"""Every name that becomes a path, a key or a word on a page: one rule each, and nothing that leads out of its place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cairn.model.errors import InvalidInput
from cairn.storage.checkpoints.payload import ManifestObject
from cairn.storage.errors import StorageError
from cairn.storage.logs.registry import Registry
from cairn.storage.logs.run_log import RunLog, run_prefix
from cairn.storage.snapshots.snapshot_manifest import SnapshotObject
from cairn.tasks.configuration.settings import EvaluationConfig, EvaluatorConfig, PromotionConfig
from cairn.tasks.trainer.initial_weights import InitialDirectory, _weight_files
from tests.memory_store import MemoryStore

NAMES = [
    "",
    ".",
    "..",
    "../x",
    "a/../b",
    "/etc/passwd",
    "a\\b",
    "..\\..\\x",
    "C:\\x",
    "C:/x",
    "a\0b",
    "a\nb",
    "a\n",
    "\x1b[2J",
    "a b",
    "~root",
    "-rf",
    ".hidden",
    "<script>",
    "a|b",
    "x" * 100_000,
    "\u202etxt",
    "a\u0000",
    "%2e%2e",
]
TAKERS: dict[str, Callable[[str], object]] = {
    "run id": run_prefix,
    "run": lambda name: RunLog(MemoryStore(), name),
    "alias": lambda name: Registry(MemoryStore(), name),
    "payload": lambda name: ManifestObject(name=name, bytes=1, sha256="0"),
    "snapshot object": lambda name: SnapshotObject(key=name, bytes=1, sha256="0"),
    "evaluator": lambda name: EvaluatorConfig(name=name, command=("true",)),
    "suite": lambda name: EvaluationConfig(name=name),
    "alias to promote to": lambda name: PromotionConfig(alias=name),
}
# Long names are the store's to refuse where they become keys: these become none.
NOT_KEYS = {"evaluator", "suite", "alias to promote to", "payload"}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:12]))
@pytest.mark.parametrize("taker", TAKERS)
def test_a_name_that_leads_elsewhere_is_refused(taker: str, name: str) -> None:
    if len(name) > 1_000 and taker in NOT_KEYS:
        pytest.skip("becomes no path by itself")
    with pytest.raises((StorageError, ValueError, ValidationError)) as refused:
        TAKERS[taker](name)
    assert "\x1b" not in str(refused.value) and len(str(refused.value)) < 2_000


@pytest.mark.parametrize("name", ["a", "A-b_c.1", "0"])
@pytest.mark.parametrize("taker", [taker for taker in TAKERS if taker != "payload"])
def test_a_plain_name_is_taken(taker: str, name: str) -> None:
    TAKERS[taker](name)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if len(name) < 1_000 and "\0" not in name], ids=lambda name: repr(name[:12])
)
def test_an_index_of_weights_names_nothing_outside_its_folder(tmp_path: Path, name: str) -> None:
    import json

    (tmp_path / "secret.safetensors").write_bytes(b"")
    folder = tmp_path / "folder"
    folder.mkdir()
    for named in (name, f"{name}/../../secret.safetensors", "../secret.safetensors"):
        index: dict[str, Any] = {"weight_map": {"a": named}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(InvalidInput, match=r"names|missing|cannot be read"):
            _weight_files(InitialDirectory("folder", tmp_path))
