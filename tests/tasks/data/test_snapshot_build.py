import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from cairn.model.configuration.data import DataConfig
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.storage.errors import ObjectMissing, SnapshotDamaged, StorageError
from cairn.storage.snapshots.data_snapshot import OpenSnapshot, open_snapshot
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.foreign_tokenizer import parse_tokenizer
from cairn.tasks.data.snapshot_build import build_snapshot, repair_snapshot
from cairn.tasks.data.snapshot_lookup import SnapshotReference, check_block_size
from tests.flipped_bit import flip_object
from tests.memory_store import CrashingStore, MemoryStore
from tests.tasks.corpus_files import build_in_shards, shaped
from tests.text.shakespeare import TINY_SHAKESPEARE

pytestmark = pytest.mark.usefixtures("forked_parsers")

PARAGRAPHS = [f"Paragraph {number} speaks of stone {number * number % 97} on the long way up." for number in range(60)]
BYTES = DataConfig(sources=("a.jsonl",), tokenizer="bytes")
BPE = DataConfig(sources=("a.jsonl",), tokenizer="bpe:300")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(shaped(PARAGRAPHS, "jsonl"))
    return tmp_path


def open_built(store: ObjectStore, reference: SnapshotReference, base: Path) -> OpenSnapshot:
    return open_snapshot(store, reference.snapshot_id, base / "cache")


def documents_in(snapshot: OpenSnapshot, shards: Iterable[np.ndarray]) -> list[str]:
    tokenizer = parse_tokenizer(snapshot.tokenizer_json)
    tokens = np.concatenate(list(shards))
    ends = np.flatnonzero(tokens == snapshot.manifest.end_of_text_id) + 1
    assert ends[-1] == len(tokens)
    return [tokenizer.decode(part[:-1].tolist()) for part in np.split(tokens, ends[:-1])]


def split_of_documents(data: DataConfig, base: Path) -> dict[str, str]:
    store = MemoryStore()
    opened = open_built(store, build_snapshot(store, data, base), base)
    train, val = documents_in(opened, opened.train), documents_in(opened, opened.val)
    return {**dict.fromkeys(train, "train"), **dict.fromkeys(val, "val")}


@pytest.mark.parametrize("data", [BYTES, BPE])
def test_every_document_comes_back_once_with_end_of_text_after_it(text: Path, data: DataConfig) -> None:
    store = MemoryStore()
    opened = open_built(store, build_snapshot(store, data, text), text)
    found = documents_in(opened, opened.train) + documents_in(opened, opened.val)
    assert sorted(found) == sorted(PARAGRAPHS)


def test_the_manifest_counts_what_the_shards_hold(text: Path) -> None:
    store = MemoryStore()
    reference = build_in_shards(512, store, BYTES, text)
    opened, splits = open_built(store, reference, text), reference.manifest.splits
    assert [sum(map(len, opened.train)), sum(map(len, opened.val))] == [splits.train.tokens, splits.val.tokens]
    assert splits.train.bytes + splits.val.bytes == sum(map(len, PARAGRAPHS))
    assert splits.train.documents + splits.val.documents == len(PARAGRAPHS)
    assert len(opened.train) == -(-splits.train.tokens // 512)


def test_the_document_index_finds_each_text_in_its_source(text: Path) -> None:
    store = MemoryStore()
    reference = build_snapshot(store, BYTES, text)
    table = parquet.read_table(pa.BufferReader(store.read(f"data/{reference.snapshot_id}/documents.parquet")))
    content = (text / "a.jsonl").read_bytes()
    lines = [content[row["offset_bytes"] :].partition(b"\n")[0] for row in table.to_pylist()]
    assert [json.loads(line)["text"] for line in lines] == PARAGRAPHS


@pytest.mark.parametrize("data", [BYTES, BPE])
def test_the_same_input_gives_the_same_id_anywhere(tmp_path: Path, data: DataConfig) -> None:
    ids = set()
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.jsonl").write_bytes(shaped(PARAGRAPHS, "jsonl"))
        ids.add(build_snapshot(MemoryStore(), data, tmp_path / place).snapshot_id)
    assert len(ids) == 1


@pytest.mark.parametrize(
    "change",
    [{"val_fraction": 0.2}, {"tokenizer": "bpe:300"}, {"sources": ("a.jsonl", "b.jsonl")}],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_the_data_changes_the_id(text: Path, change: dict[str, object]) -> None:
    (text / "b.jsonl").write_bytes(shaped(["more"], "jsonl"))
    store = MemoryStore()
    changed = BYTES.model_copy(update=change)
    assert build_snapshot(store, BYTES, text).snapshot_id != build_snapshot(store, changed, text).snapshot_id


def test_what_of_a_text_is_held_out_changes_the_id(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(PARAGRAPHS))
    base = DataConfig(sources=("a.txt",), tokenizer="bytes", max_document_bytes=200)
    configs = (base, base.model_copy(update={"split": "documents"}))
    assert len({build_snapshot(MemoryStore(), data, tmp_path).snapshot_id for data in configs}) == 2


def test_adding_a_file_to_a_glob_never_moves_a_document(tmp_path: Path) -> None:
    data = DataConfig(sources=("*.txt",), tokenizer="bytes", split="documents")
    for number, paragraph in enumerate(PARAGRAPHS[:40]):
        (tmp_path / f"{number}.txt").write_text(paragraph)
    before = split_of_documents(data, tmp_path)
    for number, paragraph in enumerate(PARAGRAPHS[40:]):
        (tmp_path / f"0{number}.txt").write_text(paragraph)
    assert before.items() <= split_of_documents(data, tmp_path).items()


def test_the_tokenizer_learns_from_train_alone(text: Path) -> None:
    splits = split_of_documents(BYTES, text)
    train = [paragraph for paragraph in PARAGRAPHS if splits[paragraph] == "train"]
    store = MemoryStore()
    reference = build_snapshot(store, BPE, text)
    assert reference.manifest.tokenizer_sha256 == Tokenizer.train_bpe(train, 300).sha256


def test_a_tokenizer_file_is_used_as_it_is(text: Path) -> None:
    tokenizer = Tokenizer.train_bpe(PARAGRAPHS, 290)
    (text / "tokenizer.json").write_text(tokenizer.json)
    data = DataConfig(sources=("a.jsonl",), tokenizer="tokenizer.json")
    assert build_snapshot(MemoryStore(), data, text).manifest.tokenizer_sha256 == tokenizer.sha256


def test_the_second_build_of_a_recipe_tokenizes_nothing(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    first = build_snapshot(store, BPE, text)
    monkeypatch.delattr(Tokenizer, "train_bpe")
    monkeypatch.delattr(Tokenizer, "encode_batch")
    second = build_snapshot(store, BPE, text)
    assert second.snapshot_id == first.snapshot_id
    assert second.manifest == first.manifest
    assert (first.reused, second.reused) == (False, True)


def break_recipe(store: ObjectStore, key: str, snapshot_id: str) -> None:
    store.write(key, b"{")


def delete_marker(store: ObjectStore, key: str, snapshot_id: str) -> None:
    store.delete(f"data/{snapshot_id}/snapshot.json")


@pytest.mark.parametrize("harm", [break_recipe, delete_marker])
def test_a_recipe_that_leads_nowhere_is_built_again(text: Path, harm: Callable[[ObjectStore, str, str], None]) -> None:
    store = MemoryStore()
    first = build_snapshot(store, BYTES, text)
    (key,) = store.keys("data/recipes")
    harm(store, key, first.snapshot_id)
    second = build_snapshot(store, BYTES, text)
    assert (second.snapshot_id, second.reused) == (first.snapshot_id, False)
    assert open_built(store, second, text).train


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_crash_between_any_two_writes_leaves_nothing_visible_or_a_whole_snapshot(text: Path, kind: str) -> None:
    whole = build_in_shards(1024, MemoryStore(), BYTES, text).snapshot_id
    outcomes = []
    for crash_at in range(100):
        inner = MemoryStore() if kind == "memory" else LocalStore(text / f"store-{crash_at}")
        try:
            build_in_shards(1024, CrashingStore(inner, crash_at), BYTES, text)
        except StorageError:
            outcomes.append(visible(inner, whole, text))
            assert build_in_shards(1024, inner, BYTES, text).snapshot_id == whole
            assert visible(inner, whole, text)
        else:
            break
    # tokenizer, index, at least four shards and the marker; only the recipe comes after it
    assert len(outcomes) >= 8
    assert outcomes == [False] * (len(outcomes) - 1) + [True]


def visible(store: ObjectStore, snapshot_id: str, base: Path) -> bool:
    try:
        return bool(open_snapshot(store, snapshot_id, base / "cache").train)
    except ObjectMissing:
        return False


def test_nothing_is_left_in_the_temporary_folder(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(text / "temporary"))
    with pytest.raises(StorageError, match="crashed"):
        build_snapshot(CrashingStore(MemoryStore(), 1), BYTES, text)
    assert not list((text / "temporary").iterdir())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (BPE.model_copy(update={"tokenizer": "bpe:256"}), r"data.tokenizer = 'bpe:256': .*256 ids; rule: from 257"),
        (BPE.model_copy(update={"tokenizer": f"bpe:{2**32 + 1}"}), r"4294967297 ids; rule: .* to 4294967296"),
        (BPE.model_copy(update={"tokenizer": "bpe:60000"}), r"data.tokenizer = 'bpe:60000': .*too big"),
        (BPE.model_copy(update={"tokenizer": "absent.json"}), r"data.tokenizer = 'absent.json': .*absent.json"),
        (BPE.model_copy(update={"sources": ("absent.txt",)}), r"data.sources = 'absent.txt': no such file"),
        (BPE.model_copy(update={"val_fraction": 1e-9}), r"data.val_fraction = 1e-09: .* the val split"),
        (BPE.model_copy(update={"val_fraction": 1 - 1e-9}), r"data.val_fraction = .* the train split"),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_written(text: Path, data: DataConfig, message: str) -> None:
    store = MemoryStore()
    with pytest.raises(InvalidCorpus, match=message):
        build_snapshot(store, data, text)
    assert not store.keys("data")


def test_a_block_size_that_fits_both_splits_is_accepted(text: Path) -> None:
    manifest = build_snapshot(MemoryStore(), BYTES, text).manifest
    check_block_size(manifest, ModelConfig(block_size=manifest.splits.val.tokens - 1), BYTES, TrainingConfig(steps=1))


def test_a_block_size_longer_than_a_split_is_refused_with_the_greatest_that_fits(text: Path) -> None:
    manifest = build_snapshot(MemoryStore(), BYTES, text).manifest
    held = manifest.splits.val.tokens
    with pytest.raises(InvalidCorpus, match=rf"model.block_size = {held}: the val split .* at most {held - 1},"):
        check_block_size(manifest, ModelConfig(block_size=held), BYTES, TrainingConfig(steps=1))


def test_tiny_shakespeare_becomes_a_snapshot(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    data = DataConfig(sources=(str(TINY_SHAKESPEARE),), tokenizer="bpe:512")
    reference = build_snapshot(store, data, tmp_path)
    splits, opened = reference.manifest.splits, open_built(store, reference, tmp_path)
    text = TINY_SHAKESPEARE.read_bytes()
    border = int(len(text) * 0.9)  # where nanoGPT cuts it
    assert (splits.train.bytes, splits.val.bytes) == (border, len(text) - border)
    assert reference.manifest.sources[0].name == "tinyshakespeare.txt"
    assert [documents_in(opened, opened.train), documents_in(opened, opened.val)] == [
        [text[:border].decode()],
        [text[border:].decode()],
    ]


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
