"""Parts of a text that machines tokenize apart: the same snapshot id as one machine's, whatever happens to them."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn.model.configuration.data import DataConfig
from cairn.storage.errors import StorageError
from cairn.storage.snapshots import token_shard
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.open_store import open_store
from cairn.tasks.data import corpus as corpus_module
from cairn.tasks.data import snapshot_writer, text_ranges
from cairn.tasks.data.corpus import find_sources, open_corpus
from cairn.tasks.data.document import InvalidCorpus, Piece
from cairn.tasks.data.snapshot_build import BuildProgress, BuildStage, build_snapshot
from cairn.tasks.data.snapshot_lookup import SnapshotReference
from cairn.tasks.tokenize_and_split import Text, tokenize_and_split, tokenize_part
from tests.flipped_bit import flip_object
from tests.memory_store import CrashingStore, MemoryStore
from tests.tasks.corpus_files import COMPRESSIONS, packed, shaped
from tests.tasks.tokenizer_kinds import PARAGRAPHS, learned, wordlevel

pytestmark = pytest.mark.usefixtures("forked_parsers")
TEXTS = [*PARAGRAPHS, *(text.upper() for text in PARAGRAPHS)]
BYTES: dict[str, Any] = {"tokenizer": "bytes"}
Corpus = Callable[[Path], DataConfig]
Alone = Callable[[Corpus], SnapshotReference]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_writer, "BATCH_BYTES", 700)
    monkeypatch.setattr(snapshot_writer, "PART_BYTES", 2000)
    monkeypatch.setattr(token_shard, "DEFAULT_SHARD_TOKENS", 512)


def plain_text(folder: Path) -> DataConfig:
    for number in range(9):
        (folder / f"{number}.txt").write_text("\n\n".join(TEXTS[number * 9 : number * 9 + 20]))
    return DataConfig(sources=("*.txt",), **BYTES)


def json_lines(folder: Path) -> DataConfig:
    for number in range(8):
        content, suffix = shaped(TEXTS[number * 15 : number * 15 + 15], "jsonl"), COMPRESSIONS[number % 3]
        (folder / f"{number}.jsonl{suffix}").write_bytes(packed(content, suffix))
    (folder / "tokenizer.json").write_text(json.dumps(learned()))
    return DataConfig(sources=("*.jsonl*",), tokenizer="tokenizer.json")


def duplicates(folder: Path) -> DataConfig:
    for number in range(6):
        (folder / f"{number}.jsonl").write_bytes(shaped(TEXTS[number * 9 : number * 9 + 30] + TEXTS[:4] * 2, "jsonl"))
    return DataConfig(sources=("*.jsonl",), deduplicate=True, **BYTES)


def rejects(folder: Path) -> DataConfig:
    for number in range(5):
        bad = b'{"text": 3}\nnonsense\n' if number % 2 else b""
        unknown = shaped(["stone snow stone", "walkers so."], "jsonl")
        (folder / f"{number}.jsonl").write_bytes(shaped(TEXTS[number * 12 : number * 12 + 12], "jsonl") + bad + unknown)
    (folder / "empty.jsonl").touch()
    (folder / "tokenizer.json").write_text(json.dumps(wordlevel()))
    return DataConfig(sources=("*.jsonl",), tokenizer="tokenizer.json", max_rejected_fraction=0.9)


def held_out(folder: Path) -> DataConfig:
    for number in range(6):
        (folder / f"{number}.txt").write_text("\n\n".join(TEXTS[number * 20 : number * 20 + 20]))
    (folder / "val.jsonl").write_bytes(shaped(TEXTS[:7], "jsonl"))
    return DataConfig(sources=("0.txt", "[1-5].txt"), val_sources=("val.jsonl",), weights=(1, 2), **BYTES)


def many_files(folder: Path) -> DataConfig:
    for number in range(130):
        (folder / f"{number}.txt").write_text(f"{PARAGRAPHS[number % 60]}\n###\nNumber {number}.")
    return DataConfig(sources=("*.txt",), separator="###", **BYTES)


def one_file(folder: Path) -> DataConfig:
    (folder / "all.txt").write_text("\n\n".join(TEXTS))
    return DataConfig(sources=("all.txt",), max_document_bytes=500, **BYTES)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The snapshot that one machine makes of a corpus, made once."""

    @cache
    def build(corpus: Corpus) -> SnapshotReference:
        folder = tmp_path_factory.mktemp(corpus.__name__)
        return build_snapshot(MemoryStore(), corpus(folder), folder)

    return build


CORPORA = (plain_text, json_lines, duplicates, rejects, held_out, many_files, one_file)


def work(store: ObjectStore, data: DataConfig, folder: Path, part: int, of: int) -> tuple[int, int]:
    """Do a part; returns how many ranges it has, and how many of them were there."""
    words = tokenize_part.fn(part, of, data, folder, folder / "cache", store)
    _, _, ranges, found = map(int, re.findall(r"\d+", words))
    return ranges, found


def objects(store: ObjectStore) -> list[str]:
    return [key for key in store.keys("data/parts") if key.endswith(".arrow")]


@pytest.mark.parametrize("corpus", CORPORA, ids=lambda corpus: corpus.__name__)
@pytest.mark.parametrize("of", [pytest.param(of, marks=[pytest.mark.slow] if of != 3 else []) for of in (1, 2, 3, 7)])
def test_a_snapshot_of_parts_is_that_of_one_machine_and_tokenizes_nothing(
    corpus: Corpus, of: int, alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, store = corpus(tmp_path), MemoryStore()
    done = [work(store, data, tmp_path, part, of) for part in range(of, 0, -1)]
    assert sum(ranges for ranges, _ in done) == len({key.split("/")[2] for key in store.keys("data/parts")})
    with monkeypatch.context() as patch:
        patch.delattr(snapshot_writer.PartEncoder, "encode")
        made = build_snapshot(store, data, tmp_path)
    assert made == alone(corpus)


def test_the_borders_of_ranges_do_not_depend_on_how_many_parts_there_are(tmp_path: Path) -> None:
    sources = find_sources(many_files(tmp_path), tmp_path)
    names = {
        of: [
            [source.name for source in found]
            for part in range(1, of + 1)
            for found in text_ranges.choose_ranges(sources, part, of)
        ]
        for of in (1, 2, 5, 200)
    }
    assert len(names[1]) > 20
    assert all(found == names[1] for found in names.values())


def test_a_part_reads_no_file_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, checked = plain_text(tmp_path), list[str]()
    check = corpus_module._check
    monkeypatch.setattr(corpus_module, "_check", lambda data, file: checked.append(file.name) or check(data, file))
    work(MemoryStore(), data, tmp_path, 1, 3)
    assert checked == ["0.txt", "1.txt", "2.txt"]


@pytest.mark.parametrize("corpus", [plain_text, duplicates, rejects], ids=lambda corpus: corpus.__name__)
def test_what_no_machine_tokenized_is_tokenized_by_the_build(corpus: Corpus, alone: Alone, tmp_path: Path) -> None:
    data = corpus(tmp_path)
    for missing in (1, 2, 3):
        store = MemoryStore()
        for part in {1, 2, 3} - {missing}:
            work(store, data, tmp_path, part, 3)
        assert build_snapshot(store, data, tmp_path) == alone(corpus)


def test_a_crash_between_any_two_writes_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    data = duplicates(tmp_path).model_copy(update={"sources": ("[01].jsonl",)})
    alone, crashes = build_snapshot(MemoryStore(), data, tmp_path), 0
    while True:
        abandoned, repeated = MemoryStore(), MemoryStore()
        try:
            work(CrashingStore(abandoned, crashes), data, tmp_path, 1, 1)
            break
        except StorageError:
            assert build_snapshot(abandoned, data, tmp_path) == alone
        with pytest.raises(StorageError):
            work(CrashingStore(repeated, crashes), data, tmp_path, 1, 1)
        whole = [key for key in repeated.keys("data/parts") if key.endswith("parts.json")]
        assert work(repeated, data, tmp_path, 1, 1)[1] == len(whole)
        assert build_snapshot(repeated, data, tmp_path) == alone
        crashes += 1
    assert crashes == len(abandoned.keys("data/parts")) > 4


def test_a_part_done_again_makes_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, store = plain_text(tmp_path), MemoryStore()
    work(store, data, tmp_path, 1, 2)
    monkeypatch.delattr(snapshot_writer.PartEncoder, "encode")
    monkeypatch.delattr(MemoryStore, "write")
    ranges, found = work(store, data, tmp_path, 1, 2)
    assert ranges == found > 0


def test_a_killed_machine_goes_on_within_a_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, store, encoded = one_file(tmp_path), MemoryStore(), list[int]()
    encode = snapshot_writer.PartEncoder._encode_batch

    def count(self: snapshot_writer.PartEncoder, pieces: list[Piece]) -> pa.RecordBatch:
        encoded.append(len(pieces))
        return encode(self, pieces)

    def dying(pieces: Iterator[Piece], at: int) -> Iterator[Piece]:
        for number, piece in enumerate(pieces):
            if number == at:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(snapshot_writer.PartEncoder, "_encode_batch", count)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        read = snapshot_writer.read_corpus
        patch.setattr(snapshot_writer, "read_corpus", lambda *given, **named: dying(read(*given, **named), 14))
        work(store, data, tmp_path, 1, 1)
    encoded.clear()
    work(store, data, tmp_path, 1, 1)
    alone = build_snapshot(MemoryStore(), data, tmp_path)
    assert sum(encoded) > 0 and build_snapshot(store, data, tmp_path) == alone
    whole = sum(1 for source in open_corpus(data, tmp_path) for _ in source.pieces())
    assert sum(encoded) < whole + whole  # what `alone` encoded, and less than that again


def cut(store: ObjectStore, key: str) -> None:
    store.write(key, store.read(key)[:-8])


def lose(store: ObjectStore, key: str) -> None:
    store.delete(key)


HARMS = (flip_object, cut, lose)


@pytest.mark.parametrize(
    ("which", "harm"),
    [
        *zip((0, 1, -1), HARMS, strict=True),
        *(  # quick witness: the three before
            pytest.param(which, harm, marks=pytest.mark.slow)
            for which, rest in ((0, HARMS[1:]), (1, HARMS[::2]), (-1, HARMS[:2]))
            for harm in rest
        ),
    ],
)
def test_a_damaged_part_is_tokenized_by_the_build_which_says_so(
    which: int, harm: Callable[[ObjectStore, str], None], alone: Alone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, store = duplicates(tmp_path), MemoryStore()
    work(store, data, tmp_path, 1, 1)
    harm(store, damaged := objects(store)[which])
    assert build_snapshot(store, data, tmp_path) == alone(duplicates)
    (said,) = caplog.messages
    assert said.startswith(f"{damaged}: ") and said.endswith(": its text is tokenized again")


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_part_is_made_again_by_its_machine(
    tmp_path: Path, harm: Callable[[ObjectStore, str], None], alone: Alone
) -> None:
    data, store = duplicates(tmp_path), MemoryStore()
    work(store, data, tmp_path, 1, 1)
    harm(store, objects(store)[3])
    ranges, found = work(store, data, tmp_path, 1, 1)
    assert found == ranges - 1
    assert build_snapshot(store, data, tmp_path) == alone(duplicates)


def test_parts_of_a_text_that_changed_are_not_taken(tmp_path: Path) -> None:
    data, store = plain_text(tmp_path), MemoryStore()
    work(store, data, tmp_path, 1, 1)
    (tmp_path / "4.txt").write_text("\n\n".join(TEXTS[40:60])[::-1])
    assert build_snapshot(store, data, tmp_path) == build_snapshot(MemoryStore(), data, tmp_path)


@pytest.mark.parametrize("change", [{"val_fraction": 0.2}, {"max_document_bytes": 300}, {"tokenizer": "other.json"}])
def test_parts_of_other_settings_are_not_taken(tmp_path: Path, change: dict[str, Any]) -> None:
    data, store = one_file(tmp_path), MemoryStore()
    (tmp_path / "other.json").write_text(json.dumps(learned()))
    work(store, data, tmp_path, 1, 1)
    changed = data.model_copy(update=change)
    assert build_snapshot(store, changed, tmp_path) == build_snapshot(MemoryStore(), changed, tmp_path)
    assert objects(store)


def test_two_machines_at_one_part_do_not_disturb_each_other(alone: Alone, tmp_path: Path) -> None:
    data, store, begin = duplicates(tmp_path), LocalStore(tmp_path / "store"), threading.Barrier(3)

    def one() -> None:
        begin.wait()
        work(store, data, tmp_path, 1, 1)

    machines = [threading.Thread(target=one) for _ in range(3)]
    for machine in machines:
        machine.start()
    for machine in machines:
        machine.join()
    assert build_snapshot(store, data, tmp_path) == alone(duplicates)


@pytest.mark.parametrize("batches", [1, pytest.param(2, marks=pytest.mark.slow), 4])  # quick witness: the others
def test_a_killed_build_goes_on_over_parts_and_text(batches: int, alone: Alone, tmp_path: Path) -> None:
    data, store, seen = duplicates(tmp_path), MemoryStore(), list[BuildProgress]()

    def give_up(progress: BuildProgress) -> None:
        if progress.stage is BuildStage.TOKENIZING and (seen.append(progress) or len(seen)) == batches:
            raise KeyboardInterrupt

    for part in (1, 3):
        work(store, data, tmp_path, part, 4)
    with pytest.raises(KeyboardInterrupt):
        build_snapshot(store, data, tmp_path, cache_dir=tmp_path / "cache", on_progress=give_up)
    assert build_snapshot(store, data, tmp_path, cache_dir=tmp_path / "cache") == alone(duplicates)


def test_too_many_bad_documents_in_parts_are_refused_as_on_one_machine(tmp_path: Path) -> None:
    data, store, said = rejects(tmp_path).model_copy(update={"max_rejected_fraction": 0.01}), MemoryStore(), []
    work(store, data, tmp_path, 1, 1)
    for each in (store, MemoryStore()):
        with pytest.raises(InvalidCorpus) as refused:
            build_snapshot(each, data, tmp_path)
        said.append(str(refused.value))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "bpe:300"}, r"data.tokenizer = 'bpe:300': is learned from all .*; rule: .*tokenizer.json"),
        ({"sources": ("snapshot:0123abcd",)}, r"data.sources = 'snapshot:0123abcd': .*; rule: "),
    ],
)
def test_what_has_no_parts_is_refused_with_what_to_do(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    data = plain_text(tmp_path).model_copy(update=change)
    with pytest.raises(InvalidCorpus, match=message):
        work(MemoryStore(), data, tmp_path, 1, 1)


def test_a_part_that_is_none_of_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidCorpus, match="part = 4: rule: from 1 to the number of parts, of = 3"):
        work(MemoryStore(), plain_text(tmp_path), tmp_path, 4, 3)


def test_the_step_publishes_a_snapshot_that_opens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph {number}" for number in range(50)))
    text = Text(data=DataConfig(sources=("a.txt",), tokenizer="bytes"), base_dir=tmp_path, cache_dir=tmp_path / "cache")
    store = open_store(str(tmp_path / "store"))
    reference = tokenize_and_split.fn(text, store)
    assert open_snapshot(store, reference.snapshot_id, tmp_path).train


def test_the_task_bears_the_name_people_look_for() -> None:
    assert tokenize_and_split.name == "tokenize-and-split"
