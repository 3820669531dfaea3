import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from cairn.model.configuration.data import DataConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.storage.snapshots.snapshot_manifest import SnapshotManifest
from cairn.tasks.data import snapshot_writer
from cairn.tasks.data.document import Document, InvalidCorpus, TextSample, make_document, split_of
from cairn.tasks.data.snapshot_build import BuildProgress, BuildStage, build_folder, build_snapshot
from cairn.tasks.data.snapshot_lookup import SnapshotReference
from tests.memory_store import MemoryStore
from tests.tasks.corpus_files import build_in_shards, packed, shaped

pytestmark = pytest.mark.usefixtures("forked_parsers")
TEXTS = [f"Text {number}: " + " ".join(f"stone{number * k % 89}" for k in range(1, 30)) for number in range(300)]
DATA = DataConfig(sources=("*.jsonl", "b.*", "c.ndjson", "*.gz"), tokenizer="bpe:300")


@pytest.fixture
def every_shape(corpus: Path) -> Path:
    """The corpus with a table, which a process of its own reads."""
    (corpus / "b.ndjson").unlink()
    (corpus / "b.parquet").write_bytes(shaped(TEXTS[120:200], "parquet"))
    return corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(shaped(TEXTS[:120], "jsonl"))
    (tmp_path / "b.ndjson").write_bytes(shaped(TEXTS[120:200], "ndjson"))
    (tmp_path / "c.ndjson").write_bytes(shaped(TEXTS[200:250], "ndjson"))
    (tmp_path / "d.jsonl.gz").write_bytes(packed(shaped(TEXTS[250:], "jsonl"), ".gz"))
    return tmp_path


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_writer, "BATCH_BYTES", 1500)


def built(data: DataConfig, base: Path) -> SnapshotReference:
    return build_in_shards(4096, MemoryStore(), data, base)


def index_of(data: DataConfig, base: Path, name: str = "documents") -> list[dict[str, object]]:
    store = MemoryStore()
    reference = build_snapshot(store, data, base)
    table = parquet.read_table(pa.BufferReader(store.read(f"data/{reference.snapshot_id}/{name}.parquet")))
    return list(table.to_pylist())


def counts(manifest: SnapshotManifest) -> dict[str, int]:
    return {item.kind: item.documents for item in manifest.rejected}


def test_the_id_does_not_depend_on_workers_batches_or_parts(every_shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {built(DATA, every_shape).snapshot_id}
    for workers, batch_bytes, part_bytes in ((1, 1500, 3000), (5, 500, 9999)):
        monkeypatch.setattr(snapshot_writer, "WORKERS", workers)
        monkeypatch.setattr(snapshot_writer, "BATCH_BYTES", batch_bytes)
        monkeypatch.setattr(snapshot_writer, "PART_BYTES", part_bytes)
        ids.add(built(DATA, every_shape).snapshot_id)
    assert len(ids) == 1


def test_the_id_does_not_depend_on_the_order_of_sources(corpus: Path) -> None:
    turned = DATA.model_copy(update={"sources": DATA.sources[::-1]})
    assert built(DATA, corpus).snapshot_id == built(turned, corpus).snapshot_id


def test_every_document_of_every_shape_is_in_the_index_in_order(every_shape: Path) -> None:
    rows = index_of(DATA, every_shape)
    assert [row["sha256"] for row in rows] == [make_document("", 0, text.encode()).sha256 for text in TEXTS]
    assert dict(Counter(row["source"] for row in rows)) == {
        "a.jsonl": 120,
        "b.parquet": 80,
        "c.ndjson": 50,
        "d.jsonl.gz": 50,
    }


def test_no_text_is_in_both_splits(corpus: Path) -> None:
    (corpus / "e.jsonl").write_bytes(shaped(TEXTS[40:90], "jsonl"))
    rows = index_of(DATA, corpus)
    held = {split: {row["sha256"] for row in rows if row["split"] == split} for split in ("train", "val")}
    assert held["train"] and held["val"] and not held["train"] & held["val"]


def test_adding_a_file_of_another_shape_moves_no_document(corpus: Path) -> None:
    before = {row["sha256"]: row["split"] for row in index_of(DATA, corpus)}
    (corpus / "0.jsonl").write_bytes(shaped([f"Added {number}" for number in range(60)], "jsonl"))
    after = {row["sha256"]: row["split"] for row in index_of(DATA, corpus)}
    assert before.items() <= after.items() and len(after) == len(before) + 60


def test_rejected_documents_are_counted_and_listed(corpus: Path) -> None:
    with (corpus / "a.jsonl").open("ab") as file:
        file.write(b'{"text": 3}\n{"no": "text"}\nnonsense\n')
    (store, data) = MemoryStore(), DATA.model_copy(update={"max_rejected_fraction": 0.02})
    manifest = build_snapshot(store, data, corpus).manifest
    assert counts(manifest) == {"missing-field": 1, "not-a-string": 1, "not-json": 1}
    assert sum(item.documents for item in manifest.sources) == len(TEXTS)
    rows = index_of(data, corpus, "rejected")
    assert [row["kind"] for row in rows] == ["not-a-string", "missing-field", "not-json"]
    content = (corpus / "a.jsonl").read_bytes()
    assert all(row["source"] == "a.jsonl" for row in rows)
    assert content[int(str(rows[2]["offset_bytes"])) :] == b"nonsense\n"


def test_more_bad_documents_than_allowed_stop_the_job_naming_the_worst(corpus: Path) -> None:
    with (corpus / "a.jsonl").open("ab") as file:
        file.write(b"nonsense\n" * 5 + b'{"text": 3}\n')
    store = MemoryStore()
    with pytest.raises(
        InvalidCorpus, match=r"6 of 306 .*, 5 of them not-json in a\.jsonl, the first at line 121: .*; rule: "
    ):
        build_snapshot(store, DATA, corpus)
    assert not store.keys("data")


def test_a_stricter_share_refuses_what_an_easier_one_had_built(corpus: Path) -> None:
    (corpus / "bad.jsonl").write_bytes(b"nonsense\n")
    store = MemoryStore()
    build_snapshot(store, DATA, corpus)
    with pytest.raises(InvalidCorpus, match=r"1 of 301 documents .*, 1 not-json; rule: "):
        build_snapshot(store, DATA.model_copy(update={"max_rejected_fraction": 0.001}), corpus)


def test_a_corpus_of_bad_documents_alone_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(InvalidCorpus, match=r"1 of 1 documents .* not-utf8 in a\.txt"):
        built(DataConfig(sources=("*.txt",), split="documents"), tmp_path)


def test_duplicates_stay_unless_they_are_unwanted(corpus: Path) -> None:
    (corpus / "e.jsonl").write_bytes(shaped(TEXTS[:40] * 2, "jsonl"))
    assert len(index_of(DATA, corpus)) == len(TEXTS) + 80
    manifest = built(DATA.model_copy(update={"deduplicate": True}), corpus).manifest
    assert counts(manifest) == {"duplicate": 80}
    assert {item.name: item.documents for item in manifest.sources}["e.jsonl"] == 0


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(
    ("part", "settings"),
    [
        pytest.param(1, {}, id="early", marks=pytest.mark.slow),  # quick witness: the next cases
        pytest.param(4, {"deduplicate": True}, id="midway and deduplicating"),
        pytest.param(3, {"weights": (3.0, 1.0, 2.0, 1.0)}, id="midway, with sources kept apart"),
        pytest.param(10**6, {}, id="while assembling", marks=pytest.mark.slow),
    ],
)
def test_a_killed_build_goes_on_from_its_parts_to_the_same_bytes(
    every_shape: Path, part: int, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = every_shape
    (corpus / "e.jsonl").write_bytes(shaped(TEXTS[::3], "jsonl"))
    data = DATA.model_copy(update=settings)
    whole = built(data, corpus).snapshot_id
    words = [sys.executable, "-m", "tests.tasks.killed_build", str(corpus), str(part), data.model_dump_json()]
    killed = subprocess.run(words, check=False)
    assert killed.returncode == -signal.SIGKILL
    parts = len(list((corpus / "cache").glob("snapshots-in-work/*/*/part-*.arrow")))
    assert parts >= 1
    if part == 10**6:
        monkeypatch.delattr(Tokenizer, "encode_flat")  # nothing is left to encode but an empty end
    monkeypatch.delattr(Tokenizer, "train_bpe")
    reported: list[BuildProgress] = []
    reference = build_in_shards(
        4096, MemoryStore(), data, corpus, cache_dir=corpus / "cache", on_progress=reported.append
    )
    assert reference.snapshot_id == whole
    encoded = [item for item in reported if item.stage is BuildStage.TOKENIZING]
    assert all(item.bytes_done > 4000 * parts for item in encoded)
    assert not list((corpus / "cache").glob("snapshots-in-work/*/"))


def test_two_builders_of_one_recipe_do_not_disturb_each_other(corpus: Path) -> None:
    inner: list[str] = []

    def meanwhile(progress: BuildProgress) -> None:
        if progress.stage is BuildStage.TOKENIZING and not inner:
            inner.append("begun")
            inner.append(build_snapshot(MemoryStore(), DATA, corpus, cache_dir=corpus / "cache").snapshot_id)

    outer = build_snapshot(MemoryStore(), DATA, corpus, cache_dir=corpus / "cache", on_progress=meanwhile)
    assert inner[1] == outer.snapshot_id


@pytest.mark.usefixtures("small_batches")
def test_parts_of_a_source_that_changed_are_not_used_again(corpus: Path) -> None:
    def disturb(progress: BuildProgress) -> None:
        if progress.stage is BuildStage.TOKENIZING:
            (corpus / "d.jsonl.gz").write_bytes(packed(shaped(TEXTS[:50], "jsonl"), ".gz"))

    with pytest.raises(InvalidCorpus, match="changed while it was read"):
        build_snapshot(MemoryStore(), DATA, corpus, cache_dir=corpus, on_progress=disturb)
    assert not list(corpus.glob("snapshots-in-work/*/"))


@pytest.mark.usefixtures("small_batches")
def test_progress_never_goes_back_and_ends_at_the_whole(corpus: Path) -> None:
    reported: list[BuildProgress] = []
    manifest = build_snapshot(MemoryStore(), DATA, corpus, on_progress=reported.append).manifest
    for stage in (BuildStage.TOKENIZING, BuildStage.WRITING):
        done = [item for item in reported if item.stage is stage]
        assert [item.bytes_done for item in done] == sorted(item.bytes_done for item in done)
        assert done[-1].bytes_done == done[-1].bytes_total == manifest.splits.train.bytes + manifest.splits.val.bytes
        assert done[-1].documents == len(TEXTS)
    assert list(dict.fromkeys(item.stage for item in reported)) == list(BuildStage)


def documents() -> Iterator[Document]:
    yield from (make_document("a", number, text.encode()) for number, text in enumerate([*TEXTS, *TEXTS[:20]]))


@pytest.mark.parametrize("limit", [1, 500, 5000, 10**6])
def test_the_sample_is_the_same_in_any_order_and_within_its_bound(limit: int) -> None:
    forward, backward = TextSample(limit), TextSample(limit)
    for document in documents():
        forward.offer(document)
    for document in reversed(list(documents())):
        backward.offer(document)
    chosen = list(forward.texts())
    assert chosen == list(backward.texts())
    assert sum(len(text.encode()) for text in chosen) <= limit
    assert len(chosen) > (0 if limit > 500 else -1)


def test_a_bounded_sample_teaches_the_same_tokenizer_whatever_the_order(corpus: Path) -> None:
    data = DATA.model_copy(update={"tokenizer_bytes": 20_000})
    turned = data.model_copy(update={"sources": data.sources[::-1]})
    one, two = built(data, corpus).manifest, built(turned, corpus).manifest
    assert one.tokenizer_sha256 == two.tokenizer_sha256 != built(DATA, corpus).manifest.tokenizer_sha256


def test_the_split_of_a_document_is_in_its_row(corpus: Path) -> None:
    assert all(row["split"] == split_of(str(row["sha256"]), DATA.val_fraction) for row in index_of(DATA, corpus))


@pytest.mark.usefixtures("small_batches")
def test_a_part_that_cannot_be_read_is_made_again_with_all_after_it(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_writer, "PART_BYTES", 4000)

    def give_up(progress: BuildProgress) -> None:
        if progress.stage is BuildStage.WRITING:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_in_shards(4096, MemoryStore(), DATA, corpus, cache_dir=corpus, on_progress=give_up)
    parts = sorted(corpus.glob("snapshots-in-work/*/*/part-*.arrow"))
    assert len(parts) > 5
    parts[3].write_bytes(parts[3].read_bytes()[:100])
    again = build_in_shards(4096, MemoryStore(), DATA, corpus, cache_dir=corpus)
    assert again.snapshot_id == built(DATA, corpus).snapshot_id


def test_work_nobody_came_back_for_is_swept_and_work_under_way_is_not(tmp_path: Path) -> None:
    work = tmp_path / "snapshots-in-work"
    with ExitStack() as stack:
        for name in ("forgotten", "recent"):
            with pytest.raises(KeyboardInterrupt), build_folder(tmp_path, name) as folder:
                (folder / "part-000000.arrow").touch()
                raise KeyboardInterrupt
        stack.enter_context(build_folder(tmp_path, "long"))
        for name in ("forgotten", "long"):
            os.utime(work / f"{name}.lock", (0, 0))
        stack.enter_context(build_folder(tmp_path, "new"))
        assert sorted(path.name for path in work.glob("*/")) == ["long", "new", "recent"]
