"""Sources mixed by weight: what lies where in the snapshot, what a step draws, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from cairn.model.configuration.data import DataConfig
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.sample_order import SampleOrder
from cairn.storage.snapshots.data_snapshot import OpenSnapshot, open_snapshot
from cairn.storage.stores.codec import encode, sha256
from cairn.tasks.data.corpus import open_corpus
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.foreign_tokenizer import parse_tokenizer
from cairn.tasks.data.snapshot_build import build_snapshot
from cairn.tasks.data.snapshot_lookup import SnapshotReference, check_block_size, weighted_components
from tests.memory_store import MemoryStore
from tests.tasks.corpus_files import build_in_shards, shaped

BLOCK = 16
SOURCES = ("web/*.txt", "books.ndjson", "code/*.jsonl")
"""Neither as they are listed, nor by the names of their files, do they come in the order of their names."""

DATA = DataConfig(sources=SOURCES, weights=(3, 1, 2), tokenizer="bytes", val_fraction=0.2, split="documents")
GOLDEN = "8303099106c190abf69164fe1a99f3126fae78140c423eedca9cc4955f51b08a"
GOLDEN_RECIPE = "69e399cf1e9935e73f8cdc1ef67867c88b0366725183bae6e44c5534bf0e5345"


def write_corpus(folder: Path) -> Path:
    """Text whose every byte tells which entry named it: w, b or c."""
    for name in ("web", "code"):
        (folder / name).mkdir(parents=True)
    for number in range(30):
        (folder / "web" / f"{number:02d}.txt").write_text("w" * (20 + number))
    (folder / "books.ndjson").write_bytes(shaped(["b" * (10 + number) for number in range(60)], "ndjson"))
    for name in ("a", "z"):
        lines = (json.dumps({"text": "c" * (30 + number) + name}) for number in range(25))
        (folder / "code" / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


def built(data: DataConfig, base: Path, store: MemoryStore | None = None) -> SnapshotReference:
    return build_in_shards(512, store or MemoryStore(), data, base)


def opened(data: DataConfig, base: Path) -> OpenSnapshot:
    store = MemoryStore()
    return open_snapshot(store, built(data, base, store).snapshot_id, base / "cache")


def order_of(snapshot: OpenSnapshot, data: DataConfig) -> SampleOrder:
    return SampleOrder(
        window_count=(snapshot.manifest.splits.train.tokens - 1) // BLOCK,
        seed=5,
        global_batch=6,
        components=weighted_components(snapshot.manifest, data, BLOCK),
    )


def letters(snapshot: OpenSnapshot, window: int) -> str:
    """Return which entries' letters stand in a window and its target."""
    tokens = np.concatenate([np.asarray(shard) for shard in snapshot.train])
    text = parse_tokenizer(snapshot.tokenizer_json).decode(
        [token for token in tokens[window * BLOCK : (window + 1) * BLOCK + 1].tolist() if token != 256]
    )
    return "".join(sorted(set(text) & set("wbc")))


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_documents_of_an_entry_lie_together_in_the_order_of_the_entries_names(corpus: Path, split: str) -> None:
    snapshot = opened(DATA, corpus)
    tokens = np.concatenate([np.asarray(shard) for shard in getattr(snapshot, split)])
    assert [group.name for group in snapshot.manifest.known_groups] == ["books.ndjson", "code/*.jsonl", "web/*.txt"]
    start = 0
    for group, letter in zip(snapshot.manifest.known_groups, "bcw", strict=True):
        own = tokens[start : start + group.tokens(split)]  # type: ignore[arg-type]
        assert set(own.tolist()) <= {ord(letter), 256, ord("a"), ord("z")} and ord(letter) in own
        start += len(own)
    assert start == len(tokens)


def test_a_group_counts_its_files(corpus: Path) -> None:
    assert [group.sources for group in built(DATA, corpus).manifest.known_groups] == [1, 2, 30]


def test_steps_draw_the_entries_by_their_weights_and_no_window_of_two(corpus: Path) -> None:
    snapshot = opened(DATA, corpus)
    drawn = order_of(snapshot, DATA).windows_between(0, 30).ravel().tolist()
    seen = [letters(snapshot, window) for window in drawn]
    assert {letter: seen.count(letter) for letter in set(seen)} == {"w": 90, "b": 30, "c": 60}


def test_beside_held_out_files_steps_draw_all_other_text_by_its_weights(corpus: Path) -> None:
    held = {"sources": ("web/*.txt", "code/*.jsonl"), "weights": (3, 1), "val_sources": ("books.ndjson", "web/0*.txt")}
    data = DataConfig(**held, tokenizer="bytes")
    snapshot = opened(data, corpus)
    drawn = [letters(snapshot, window) for window in order_of(snapshot, data).windows_between(0, 30).ravel().tolist()]
    assert {letter: drawn.count(letter) for letter in set(drawn)} == {"w": 135, "c": 45}
    groups = snapshot.manifest.known_groups
    assert [(group.name, group.sources, group.train_tokens > 0, group.val_tokens > 0) for group in groups] == [
        ("books.ndjson", 1, False, True),
        ("code/*.jsonl", 2, True, False),
        ("web/*.txt", 20, True, False),
        ("web/0*.txt", 10, False, True),
    ]


def test_the_order_of_the_entries_changes_neither_snapshot_nor_batches(corpus: Path) -> None:
    turned = DATA.model_copy(update={"sources": SOURCES[::-1], "weights": DATA.weights[::-1]})
    one, two = opened(DATA, corpus), opened(turned, corpus)
    assert sha256(encode(one.manifest)) == sha256(encode(two.manifest))  # which is the snapshot's id
    batches = [order_of(one, data).windows_between(0, 20).tolist() for data in (DATA, turned)]
    assert batches[0] == batches[1]


def test_other_weights_use_the_same_snapshot(corpus: Path) -> None:
    store = MemoryStore()
    first = built(DATA, corpus, store)
    second = built(DATA.model_copy(update={"weights": (1.0, 5.0, 1.0)}), corpus, store)
    assert (second.snapshot_id, second.reused) == (first.snapshot_id, True)


def test_where_the_text_lies_and_how_its_path_is_written_changes_no_id(corpus: Path, tmp_path: Path) -> None:
    elsewhere = write_corpus(tmp_path / "else" / "where")
    absolute = DATA.model_copy(update={"sources": tuple(f"{elsewhere}/{source}" for source in SOURCES)})
    from_above = DATA.model_copy(update={"sources": tuple(f"./corpus/{source}" for source in SOURCES)})
    ids = {built(DATA, corpus).snapshot_id, built(absolute, Path("/")).snapshot_id}
    assert ids == {built(from_above, tmp_path).snapshot_id}


def test_grouping_is_another_snapshot_than_none(corpus: Path) -> None:
    plain = DATA.model_copy(update={"weights": ()})
    manifest = built(plain, corpus).manifest
    assert manifest.known_groups == () and built(DATA, corpus).manifest != manifest


def test_without_weights_ids_and_recipes_are_those_of_before_there_were_weights(tmp_path: Path) -> None:
    for number in range(20):
        text = f"Paragraph {number} speaks of stone {number * number % 97} on the long way up.\n\nagain {number}"
        (tmp_path / f"{number:02d}.txt").write_text(text)
    store, data = MemoryStore(), DataConfig(sources=("*.txt",), tokenizer="bytes", val_fraction=0.3, split="documents")
    assert build_snapshot(store, data, tmp_path).snapshot_id == GOLDEN
    assert store.keys("data/recipes") == [f"data/recipes/{GOLDEN_RECIPE}.json"]


def test_without_weights_a_step_draws_from_all_windows(corpus: Path) -> None:
    plain = DATA.model_copy(update={"weights": ()})
    snapshot = opened(plain, corpus)
    assert weighted_components(snapshot.manifest, plain, BLOCK) == ()


def test_builtin_text_and_urls_are_entries_like_any_other(corpus: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe_file(f"/{corpus.parent.name}/x.txt", b"one")
    url = f"memory://{corpus.parent.name}/*.txt"
    data = DataConfig(sources=("web/*.txt", "python:topics", url), weights=(1, 1, 1))
    found = open_corpus(data, corpus)
    assert list(dict.fromkeys(source.group for source in found)) == ["*.txt", url, "python:topics"]


def test_a_file_of_two_entries_is_refused_with_both(corpus: Path) -> None:
    data = DATA.model_copy(update={"sources": ("web/*.txt", "web/0*.txt"), "weights": (1.0, 1.0)})
    with pytest.raises(InvalidCorpus, match=r"'web/0\*.txt'.*also named by data.sources = 'web/\*.txt'.*one weight"):
        built(data, corpus)


def test_without_weights_a_file_of_two_globs_is_read_once(corpus: Path) -> None:
    assert len(open_corpus(DataConfig(sources=("web/*.txt", "web/0*.txt")), corpus)) == 30


def test_an_entry_too_small_for_a_window_of_its_own_is_refused_by_name(corpus: Path) -> None:
    (corpus / "small.txt").write_text("\n\n".join(f"s{number}" for number in range(3)))
    data = DATA.model_copy(update={"sources": (*SOURCES, "small.txt"), "weights": (1.0, 1.0, 1.0, 1.0)})
    manifest = built(data, corpus).manifest
    with pytest.raises(InvalidCorpus, match=r"data.sources = 'small.txt': \d+ tokens .*block_size \+ 1 = 17 tokens"):
        check_block_size(manifest, ModelConfig(block_size=BLOCK), data, TrainingConfig(steps=1))


def test_weights_for_a_snapshot_that_keeps_nothing_apart_are_refused(corpus: Path) -> None:
    manifest = built(DATA.model_copy(update={"weights": ()}), corpus).manifest
    with pytest.raises(InvalidCorpus, match="keeps apart no groups"):
        weighted_components(manifest, DATA, BLOCK)


def test_an_entry_of_both_kinds_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'b.txt' is named twice; with weights every entry"):
        DataConfig(sources=("a.txt", "b.txt"), weights=(1, 1), val_sources=("./b.txt",))


def test_a_file_of_two_held_out_entries_is_refused_with_both(corpus: Path) -> None:
    held = {"sources": ("books.ndjson",), "weights": (1,), "val_sources": ("web/*.txt", "web/0*.txt")}
    with pytest.raises(InvalidCorpus, match=r"'web/0\*.txt'.*also named by data.sources = 'web/\*.txt'"):
        built(DataConfig(**held, tokenizer="bytes"), corpus)
