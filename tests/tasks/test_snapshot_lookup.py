"""A snapshot of the store as the source: looked up, never built, never made anew."""

from pathlib import Path

import pytest

from cairn.model.configuration.data import DataConfig
from cairn.storage.errors import SnapshotDamaged
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.snapshot_build import build_snapshot, repair_snapshot
from tests.flipped_bit import flip_object


@pytest.fixture
def snapshot_id(store: LocalStore, tmp_path: Path) -> str:
    for number in range(20):
        (tmp_path / f"{number:02d}.txt").write_text(f"{number} " * 60)
    data = DataConfig(sources=("1*.txt", "0*.txt"), weights=(1, 2), tokenizer="bytes", val_fraction=0.3)
    return build_snapshot(store, data, tmp_path).snapshot_id


def source(beginning: str) -> DataConfig:
    return DataConfig(sources=(f"snapshot:{beginning}",))


@pytest.mark.parametrize("characters", [8, 20, 64])
def test_it_is_found_by_its_id_or_a_beginning_and_nothing_is_built(
    store: LocalStore, snapshot_id: str, tmp_path: Path, characters: int
) -> None:
    before = store.keys("data")
    reference = build_snapshot(store, source(snapshot_id[:characters]), tmp_path / "nowhere")
    assert (reference.snapshot_id, reference.reused) == (snapshot_id, True)
    assert reference.manifest.splits.train.tokens > 0 and store.keys("data") == before


def test_one_that_is_not_there_is_refused_with_those_that_are(
    store: LocalStore, snapshot_id: str, tmp_path: Path
) -> None:
    absent = "f" * 8 if snapshot_id[0] != "f" else "e" * 8
    with pytest.raises(InvalidCorpus, match=rf"'snapshot:{absent}': no such.*import-tokens.*{snapshot_id[:12]}"):
        build_snapshot(store, source(absent), tmp_path)


def test_a_beginning_of_two_is_refused_with_both(store: LocalStore, snapshot_id: str, tmp_path: Path) -> None:
    other = snapshot_id[:-1] + ("0" if snapshot_id[-1] != "0" else "1")
    store.write(f"data/{other}/snapshot.json", b"")
    with pytest.raises(InvalidCorpus, match="2 snapshots begin so") as caught:
        build_snapshot(store, source(snapshot_id[:10]), tmp_path)
    assert snapshot_id in str(caught.value) and other in str(caught.value)
    assert build_snapshot(store, source(snapshot_id), tmp_path).snapshot_id == snapshot_id


def test_half_an_upload_is_no_snapshot(store: LocalStore, snapshot_id: str, tmp_path: Path) -> None:
    store.delete(f"data/{snapshot_id}/snapshot.json")
    with pytest.raises(InvalidCorpus, match="only a part of it is in"):
        build_snapshot(store, source(snapshot_id), tmp_path)


def test_a_damaged_shard_of_it_cannot_be_made_anew(store: LocalStore, snapshot_id: str, tmp_path: Path) -> None:
    flip_object(store, f"data/{snapshot_id}/train-00000.arrow")
    with pytest.raises(SnapshotDamaged, match=r"train-00000\.arrow damaged, .* import it again with"):
        repair_snapshot(store, snapshot_id, source(snapshot_id), tmp_path, tmp_path / "cache")


def test_undamaged_it_needs_no_repair(store: LocalStore, snapshot_id: str, tmp_path: Path) -> None:
    assert repair_snapshot(store, snapshot_id, source(snapshot_id), tmp_path, tmp_path / "cache") == ()


def test_a_damaged_shard_of_weighted_sources_is_made_anew_from_them(
    store: LocalStore, snapshot_id: str, tmp_path: Path
) -> None:
    sound = store.read(f"data/{snapshot_id}/train-00000.arrow")
    flip_object(store, f"data/{snapshot_id}/train-00000.arrow")
    data = DataConfig(sources=("0*.txt", "1*.txt"), weights=(7, 1), tokenizer="bytes", val_fraction=0.3)
    assert repair_snapshot(store, snapshot_id, data, tmp_path, tmp_path / "cache") == ("train-00000.arrow",)
    assert store.read(f"data/{snapshot_id}/train-00000.arrow") == sound
