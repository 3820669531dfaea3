import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cairn.model.data.token_windows import TokenWindows
from cairn.model.data.tokenizer import Tokenizer
from cairn.storage.snapshots.data_snapshot import DOCUMENTS, SnapshotFiles, open_snapshot
from cairn.storage.snapshots.snapshot_manifest import SPLITS, DocumentRow, TokenSpan, documents_between
from cairn.storage.stores import codec
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.foreign_tokenizer import parse_tokenizer
from cairn.tasks.data.token_files import TokenFileFormat
from cairn.tasks.data.token_import import TokenFiles, export_tokens, import_tokens, numbered_vocabulary
from tests.tasks.data.token_file_bytes import llm_c, megatron_index, npy

pytestmark = pytest.mark.usefixtures("forked_parsers")

BYTES = Tokenizer.bytes()
END = BYTES.end_of_text_id
TRAIN = ["to be", "or not to be", "ünïcode"]
VAL = ["that is the question"]


def stream(texts: list[str]) -> bytes:
    ids = [id for encoded in BYTES.encode_batch(texts) for id in (*encoded, END)]
    return np.asarray(ids, dtype="<u2").tobytes()


def headed(tokens: bytes) -> bytes:
    """These tokens as a file of llm.c's."""
    return llm_c(np.frombuffer(tokens, "<u2"))


def write(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def two_files(folder: Path, train: bytes, val: bytes | None = None) -> TokenFiles:
    """A file for each split, with the usual text to hold out."""
    held_out = stream(VAL) if val is None else val
    return {"train": (write(folder, "train.bin", train),), "val": (write(folder, "val.bin", held_out),)}


@pytest.fixture
def files(tmp_path: Path) -> TokenFiles:
    """nanoGPT's two files."""
    return two_files(tmp_path, stream(TRAIN))


def opened(store: LocalStore, files: TokenFiles, tmp_path: Path, tokenizer: Tokenizer = BYTES) -> SnapshotFiles:
    return SnapshotFiles(store, import_tokens(store, files, tokenizer).snapshot_id, tmp_path / "cache")


def train_documents(snapshot: SnapshotFiles) -> list[DocumentRow]:
    (found,) = documents_between(snapshot.path(DOCUMENTS), [TokenSpan(split="train", start=0, stop=10**9)])
    return [place.row for place in found]


def test_nanogpts_files_come_back_byte_for_byte(store: LocalStore, files: TokenFiles, tmp_path: Path) -> None:
    written = export_tokens(opened(store, files, tmp_path), tmp_path / "out", TokenFileFormat.NANOGPT)
    assert [file.path.read_bytes() for file in written] == [stream(TRAIN), stream(VAL)]


def test_llm_cs_files_come_back_byte_for_byte(store: LocalStore, tmp_path: Path) -> None:
    end = struct.pack("<H", END)
    train, val = end + stream(TRAIN)[:-2], end + stream(VAL)[:-2]  # llm.c marks where a document begins
    given = two_files(tmp_path, headed(train), headed(val))
    written = export_tokens(opened(store, given, tmp_path), tmp_path / "out", TokenFileFormat.LLM_C)
    assert [file.path.name for file in written] == ["train_000000.bin", "val_000000.bin"]
    assert [file.path.read_bytes() for file in written] == [headed(train), headed(val)]


def test_one_trainers_files_become_the_others(store: LocalStore, files: TokenFiles, tmp_path: Path) -> None:
    written = export_tokens(opened(store, files, tmp_path), tmp_path / "out", TokenFileFormat.LLM_C)
    assert written[0].path.read_bytes() == headed(stream(TRAIN))


def test_several_files_are_one_stream_in_the_order_given(store: LocalStore, tmp_path: Path) -> None:
    parts = tuple(write(tmp_path, f"part_{number}.bin", stream([text])) for number, text in enumerate(TRAIN))
    given = {**two_files(tmp_path, b""), "train": parts}
    written = export_tokens(opened(store, given, tmp_path), tmp_path / "out", TokenFileFormat.NANOGPT)
    assert written[0].path.read_bytes() == stream(TRAIN)


def test_the_manifest_counts_what_was_imported(store: LocalStore, files: TokenFiles) -> None:
    manifest = import_tokens(store, files, BYTES).manifest
    train, val = manifest.splits.train, manifest.splits.val
    text = sum(len(text.encode()) for text in TRAIN)
    assert (train.documents, train.tokens, train.bytes, val.documents) == (3, text + 3, text, 1)
    assert [(source.name, source.documents) for source in manifest.sources] == [("train.bin", 3), ("val.bin", 1)]


def test_the_index_leads_back_to_the_file_and_its_byte(store: LocalStore, files: TokenFiles, tmp_path: Path) -> None:
    content = files["train"][0].read_bytes()
    rows = train_documents(opened(store, files, tmp_path))
    found = [content[row.offset_bytes : row.offset_bytes + 2 * row.tokens] for row in rows]
    assert [BYTES.decode(np.frombuffer(part, "<u2")[:-1].tolist()) for part in found] == TRAIN


def test_what_was_imported_is_what_a_trainer_gathers(store: LocalStore, files: TokenFiles, tmp_path: Path) -> None:
    opened = open_snapshot(store, import_tokens(store, files, BYTES).snapshot_id, tmp_path / "cache")
    windows = TokenWindows(opened.train, 8, opened.manifest.vocab_size)
    tokens = np.frombuffer(stream(TRAIN), "<u2").tolist()
    assert windows.gather(np.arange(2)).tolist() == [tokens[:9], tokens[8:17]]


def test_importing_twice_gives_the_same_snapshot(store: LocalStore, files: TokenFiles) -> None:
    assert import_tokens(store, files, BYTES) == import_tokens(store, files, BYTES)


def test_without_an_end_of_text_a_file_is_cut_into_documents_that_fit_into_memory(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.tasks.data.token_import.DOCUMENT_TOKENS", 10)
    monkeypatch.setattr("cairn.tasks.data.token_import._PEEK_TOKENS", 16)
    content = np.arange(64, 64 + 47, dtype="<u2").tobytes()
    snapshot = opened(store, two_files(tmp_path, content), tmp_path)
    sizes = [row.tokens for row in train_documents(snapshot)]
    assert sizes == [10, 10, 10, 10, 7]
    assert export_tokens(snapshot, tmp_path / "out", TokenFileFormat.NANOGPT)[0].path.read_bytes() == content


def test_an_id_outside_the_vocabulary_is_refused_by_file_and_place(store: LocalStore, tmp_path: Path) -> None:
    given = two_files(tmp_path, struct.pack("<3H", 1, 2, 257))
    with pytest.raises(InvalidCorpus, match=r"train\.bin: tokens 0 to 2: token id 257: must lie in 0 to 256.*--dtype"):
        import_tokens(store, given, BYTES)
    assert store.keys("data") == []


def test_a_document_of_val_that_is_in_train_too_is_refused(store: LocalStore, tmp_path: Path) -> None:
    given = two_files(tmp_path, stream([*TRAIN, *VAL]))
    with pytest.raises(InvalidCorpus, match=r"1 documents of val are in train too, the first at train\.bin, byte"):
        import_tokens(store, given, BYTES)
    assert import_tokens(store, given, BYTES, allow_shared=True).manifest.splits.train.documents == 4


def test_a_split_without_a_file_is_refused(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidCorpus, match="--val: names no file"):
        import_tokens(store, {"train": (tmp_path / "train.bin",), "val": ()}, BYTES)


def test_two_files_of_one_name_are_refused(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidCorpus, match=r"data\.bin: two files have this name"):
        import_tokens(store, {"train": (tmp_path / "a" / "data.bin",), "val": (tmp_path / "b" / "data.bin",)}, BYTES)


def test_a_split_of_ends_alone_is_refused(store: LocalStore, files: TokenFiles, tmp_path: Path) -> None:
    write(tmp_path, "val.bin", struct.pack("<2H", END, END))
    with pytest.raises(InvalidCorpus, match="--val: holds nothing but ends of text"):
        import_tokens(store, files, BYTES)


def test_ids_without_a_tokenizer_stay_numbers(store: LocalStore, files: TokenFiles, tmp_path: Path) -> None:
    snapshot = opened(store, files, tmp_path, numbered_vocabulary(50257, END))
    assert snapshot.manifest.vocab_size == 50257
    tokenizer = parse_tokenizer(snapshot.path("tokenizer.json").read_text())
    assert tokenizer.decode([116, 111, END]) == "116 111 <|endoftext|>"
    assert tokenizer.encode_batch(["116 111"]) == [[116, 111]]


@pytest.mark.parametrize(
    ("vocab_size", "end", "why"), [(524_289, 0, "must lie in 2 to 524288"), (100, 100, "must lie in 0 to 99")]
)
def test_a_vocabulary_that_no_tokenizer_has_is_refused(vocab_size: int, end: int, why: str) -> None:
    with pytest.raises(InvalidCorpus, match=why):
        numbered_vocabulary(vocab_size, end)


WIDE_IDS = {"train": [*range(65_500, 65_600), 69_999, 7, 69_999], "val": [*range(100, 200), 65_540, 69_999]}


@pytest.mark.parametrize("form", list(TokenFileFormat))
def test_a_snapshot_of_wider_ids_is_exported_in_32_bits(
    store: LocalStore, tmp_path: Path, form: TokenFileFormat
) -> None:
    given = two_files(tmp_path, *(npy(np.array(ids, "<i8")) for ids in WIDE_IDS.values()))
    wide = numbered_vocabulary(70_000, 69_999)
    written = export_tokens(opened(store, given, tmp_path, wide), tmp_path / "out", form)
    assert [(file.dtype.name, file.map().tolist()) for file in written] == [
        ("uint32", WIDE_IDS[split]) for split in ("train", "val")
    ]


@pytest.mark.parametrize(
    ("content", "dtype"),
    [(lambda ids: npy(np.array(ids, "<i8")), ""), (lambda ids: np.array(ids, "<u4").tobytes(), "uint32")],
    ids=[".npy", "raw"],
)
def test_every_kind_of_file_gives_the_same_documents(
    store: LocalStore, files: TokenFiles, tmp_path: Path, content: Callable[[list[int]], bytes], dtype: str
) -> None:
    wanted = import_tokens(store, files, BYTES).manifest
    given = two_files(tmp_path, *(content(np.frombuffer(stream(texts), "<u2").tolist()) for texts in (TRAIN, VAL)))
    found = import_tokens(store, given, BYTES, dtype=dtype).manifest
    shards = [[item for item in each.objects if item.tokens] for each in (wanted, found)]
    assert (found.splits, shards[1]) == (wanted.splits, shards[0])


def test_megatrons_documents_end_where_its_index_says(store: LocalStore, files: TokenFiles, tmp_path: Path) -> None:
    ids = [BYTES.encode_batch([text])[0] for text in TRAIN]  # without --append-eod nothing marks their ends
    lengths = [len(each) for each in ids]
    tokens = np.array([id for each in ids for id in each], "<i4")
    write(tmp_path, "train.bin", tokens.tobytes())
    write(tmp_path, "train.idx", megatron_index(lengths, [0, 1, 2, 3], tokens.dtype))
    rows = train_documents(opened(store, files, tmp_path))
    places = [(row.offset_bytes // 4, row.tokens) for row in rows]
    assert places == [(0, lengths[0] + 1), (lengths[0], lengths[1] + 1), (lengths[0] + lengths[1], lengths[2] + 1)]


def test_documents_that_only_the_index_ends_get_the_end_that_append_eod_gives_them(
    store: LocalStore, files: TokenFiles, tmp_path: Path
) -> None:
    marked = import_tokens(store, files, BYTES)
    ids = [[*BYTES.encode_batch([text])[0], *([END] if text == TRAIN[1] else [])] for text in TRAIN]
    write(tmp_path, "train.bin", np.concatenate(ids).astype("<u2").tobytes())
    write(tmp_path, "train.idx", megatron_index([*map(len, ids)], [0, 1, 2, 3], np.dtype("<u2")))
    made = import_tokens(store, files, BYTES)
    assert (made.added_ends, marked.added_ends) == (2, 0)
    assert made.notes == ("index: 2 documents ended without an end of text, which was added to each",)
    assert [item for item in made.manifest.objects if item.key.startswith("train-")] == [
        item for item in marked.manifest.objects if item.key.startswith("train-")
    ]


def test_megatrons_documents_end_at_the_bounds_of_what_is_held_too(
    store: LocalStore, files: TokenFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.tasks.data.token_import.DOCUMENT_TOKENS", 10)
    monkeypatch.setattr("cairn.tasks.data.token_import._PEEK_TOKENS", 16)
    tokens = np.arange(64, 64 + 60, dtype="<u2")
    write(tmp_path, "train.bin", tokens.tobytes())
    write(tmp_path, "train.idx", megatron_index([5, 11, 0, 16, 28], [0, 1, 3, 5], tokens.dtype))
    snapshot = opened(store, files, tmp_path)
    assert [row.tokens for row in train_documents(snapshot)] == [6, 10, 2, 10, 10, 10, 10, 5], "an end each"


def test_with_marked_ends_megatrons_files_are_imported_as_without_their_index(
    store: LocalStore, files: TokenFiles, tmp_path: Path
) -> None:
    alone = import_tokens(store, files, BYTES)
    lengths = [len(stream([text])) // 2 for text in TRAIN]
    write(tmp_path, "train.idx", megatron_index(lengths, [0, 1, 2, 3], np.dtype("<u2")))
    assert import_tokens(store, files, BYTES) == alone


def test_a_later_file_that_is_refused_is_refused_before_anything_is_read(
    store: LocalStore, files: TokenFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.tasks.data.token_import._documents", lambda *_: pytest.fail("read"))
    files["train"][0].write_bytes(b"PAR1" * 100)
    with pytest.raises(InvalidCorpus, match="a Parquet file"):
        import_tokens(store, files, BYTES)


TODAY = {  # of what was read before other kinds were: the manifest without its files, documents and tokens
    "nanoGPT's": (stream(TRAIN), stream(VAL), 0, "8aced0f725b2b230"),
    "llm.c's": (headed(stream(TRAIN)), headed(stream(VAL)), 0, "b8c7a7f98c34b279"),
    "numbers": (np.arange(5000, dtype="<u2"), np.arange(9000, 9100, dtype="<u2"), 50257, "480f78b25822f341"),
}


@pytest.mark.parametrize("kind", TODAY)
def test_what_was_read_already_is_read_as_it_was(store: LocalStore, tmp_path: Path, kind: str) -> None:
    train, val, vocab_size, digest = TODAY[kind]
    given = two_files(tmp_path, bytes(train), bytes(val))
    tokenizer = numbered_vocabulary(vocab_size, vocab_size - 1) if vocab_size else BYTES
    snapshot = opened(store, given, tmp_path, tokenizer)
    spans = [TokenSpan(split=split, start=0, stop=10**9) for split in SPLITS]
    parts = (replace(snapshot.manifest, objects=()), documents_between(snapshot.path(DOCUMENTS), spans))
    tokens = b"".join(shard.tokens().tobytes() for split in SPLITS for shard in snapshot.shards(split))
    assert codec.sha256(codec.encode(parts) + tokens)[:16] == digest
