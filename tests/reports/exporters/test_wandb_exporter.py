"""W&B's own offline files hold one unbroken curve; skipped where wandb is not installed (`cairn-train[wandb]`)."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.reports.exporters.tracking_tools import WandbExporter
from cairn.storage.stores.local_store import LocalStore
from tests.fabricated_run import fabricate
from tests.processes.waiting import wait_until
from tests.reports.exported_run import ExportedRun, following, interrupted_run

pytest.importorskip("wandb")
pytestmark = pytest.mark.filterwarnings("ignore")  # wandb's own
BLOCK, HEADER = 32768, 7


def payloads(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: seven bytes, then the blocks of LevelDB's log."""
    data, at, parts = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        if not kind:
            return
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            yield parts
            parts = b""


def records(folder: Path) -> list[Any]:
    """The records in W&B's files below a folder."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.rglob("*.wandb")
    return [wandb_internal_pb2.Record.FromString(payload) for payload in payloads(file)]


def is_closed(folder: Path) -> bool:
    return any(record.WhichOneof("record_type") == "exit" for record in records(folder))


def history(folder: Path) -> Iterator[dict[str, Any]]:
    """Every logged row, once W&B's process has written the last of them."""
    wait_until(lambda: is_closed(folder), "the end of W&B's file")
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def curve(folder: Path, name: str = "train/loss") -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in history(folder) if name in row]


def test_wandb_has_the_surviving_line_and_the_evaluations(store: LocalStore, tmp_path: Path) -> None:
    run, exporter = interrupted_run(store), WandbExporter(tmp_path / "board", "bard")
    following(run, exporter)()
    exporter.end(run.state)
    assert curve(tmp_path / "board") == run.curve()
    assert curve(tmp_path / "board", "held-out/val_loss") == [(10, 3.0), (20, 2.0)]


def test_wandb_is_told_a_step_only_once_it_is_committed(store: LocalStore, tmp_path: Path) -> None:
    run, exporter = ExportedRun(run=fabricate(store, "bard")), WandbExporter(tmp_path / "board", "bard")
    run.start()
    run.train(1, 10)
    run.run.commit(10)
    run.train(11, 14)
    following(run, exporter)()
    exporter.end(run.state)
    assert len(curve(tmp_path / "board")) == 10


def test_the_next_process_leaves_one_folder_with_the_whole_curve(store: LocalStore, tmp_path: Path) -> None:
    run = interrupted_run(store)
    for _ in range(2):
        exporter = WandbExporter(tmp_path / "board", "bard")
        following(run, exporter)()
        exporter.end(run.state)
    assert curve(tmp_path / "board") == run.curve()
