"""A shard that is damaged while a large snapshot is trained on: nothing of it is used, and bad-data names it."""

import traceback
from contextlib import closing
from pathlib import Path

import pytest
import torch

from cairn.model.configuration.data import DataConfig
from cairn.model.data.batch_loader import BatchLoader
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.storage.errors import SnapshotDamaged
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.snapshot_build import repair_snapshot
from cairn.tasks.policy.failures import Evidence, ExceptionReport, classify, kind_of
from cairn.tasks.policy.termination import TerminationReason
from tests.flipped_bit import flip_object
from tests.tasks.corpus_files import build_in_shards

BLOCK = 16
SHARD_TOKENS = 512
DATA = DataConfig(sources=("*.txt",), tokenizer="bytes", val_fraction=0.2)


@pytest.fixture
def snapshot_id(store: LocalStore, tmp_path: Path) -> str:
    for number in range(60):
        (tmp_path / f"{number:02d}.txt").write_text(f"{number} " * 60)
    return build_in_shards(SHARD_TOKENS, store, DATA, tmp_path).snapshot_id


@pytest.fixture(autouse=True)
def lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shard is verified before its first use."""
    monkeypatch.setattr("cairn.storage.snapshots.data_snapshot.EAGER_BYTES", 0)


def test_every_batch_before_the_damaged_shard_is_trained_on_and_none_of_it(
    store: LocalStore, snapshot_id: str, tmp_path: Path
) -> None:
    key = f"data/{snapshot_id}/train-00007.arrow"
    flip_object(store, key)
    opened = open_snapshot(store, snapshot_id, tmp_path / "cache")
    windows = TokenWindows(opened.train, BLOCK, 257)
    order = SampleOrder(window_count=windows.window_count, seed=3, global_batch=2)
    first_bad = next(step for step in range(100) if 7 in shards_read_at(order, step))
    assert first_bad > 0
    with closing(BatchLoader(windows, order, torch.device("cpu"), end_step=100)) as loader:
        for step in range(first_bad):
            assert loader.batch(step).tokens.shape == (2, BLOCK + 1)
        with pytest.raises(SnapshotDamaged, match=f"{key}: sha256 is"):
            loader.batch(first_bad)


def shards_read_at(order: SampleOrder, step: int) -> set[int]:
    """Return the shards the windows of the step's batch begin in or reach into."""
    first = order.windows_of(step) * BLOCK
    return {*(first // SHARD_TOKENS).tolist(), *((first + BLOCK) // SHARD_TOKENS).tolist()}


def test_the_trainers_last_words_become_bad_data_with_the_shards_name(
    store: LocalStore, snapshot_id: str, tmp_path: Path
) -> None:
    key = f"data/{snapshot_id}/train-00002.arrow"
    flip_object(store, key)
    shard = open_snapshot(store, snapshot_id, tmp_path / "cache").train[2]
    with pytest.raises(SnapshotDamaged) as caught:
        shard[:1]
    words = ExceptionReport(
        kind=kind_of(caught.value),
        exception=caught.typename,
        message=str(caught.value),
        traceback=tuple(traceback.format_exception(caught.value)),
    )
    failure = classify(Evidence(last_words=words))
    assert (failure.reason, key in failure.detail) == (TerminationReason.BAD_DATA, True)


def test_a_damaged_shard_of_a_large_snapshot_is_made_anew_from_its_sources(
    store: LocalStore, snapshot_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.storage.snapshots.token_shard.DEFAULT_SHARD_TOKENS", SHARD_TOKENS)
    sound = store.read(f"data/{snapshot_id}/train-00002.arrow")
    flip_object(store, f"data/{snapshot_id}/train-00002.arrow")
    assert repair_snapshot(store, snapshot_id, DATA, tmp_path, tmp_path / "cache") == ("train-00002.arrow",)
    assert store.read(f"data/{snapshot_id}/train-00002.arrow") == sound
