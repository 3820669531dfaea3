"""Sources of every shape: their documents, white space in them included, bad rows, and files that change."""

import io
import json
from collections import Counter
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.snapshots.snapshot_manifest import RejectedRow
from cairn.tasks.data import document_reader
from cairn.tasks.data.document import Document, InvalidCorpus
from cairn.tasks.data.rejection import RejectionKind
from cairn.tasks.data.text_format import lines_of
from tests.tasks.corpus_files import COMPRESSIONS, SHAPES, open_sources, packed, shaped

pytestmark = pytest.mark.usefixtures("forked_parsers")

TEXTS = [f"Document {number} is about stone {number * 7 % 11} — höher." for number in range(20)]


def rejected(path: Path, content: bytes, **settings: str) -> dict[str, int]:
    path.write_bytes(content)
    (source,) = open_sources([path.name], path.parent, **settings)
    return dict(Counter(piece.kind for piece in source.pieces() if isinstance(piece, RejectedRow)))


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_compression_at_a_url_gives_the_same_documents(
    tmp_path: Path, shape: str, compression: str
) -> None:
    place = f"{tmp_path.name}/a.{shape}{compression}"
    fsspec.filesystem("memory").pipe_file(f"/{place}", packed(shaped(TEXTS, shape), compression))
    (opened,) = open_sources([f"memory://{place}"], tmp_path)
    assert [document.text for document in opened.documents()] == TEXTS


def test_a_glob_over_urls_reaches_into_folders_and_finds_each_kind(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    for shape in SHAPES:
        files.pipe_file(f"/{tmp_path.name}/in/deep/a.{shape}.zst", packed(shaped([f"{shape} text"], shape), ".zst"))
    opened = open_sources([f"memory://{tmp_path.name}/**/*.zst"], tmp_path)
    assert [document.text for source in opened for document in source.documents()] == [
        f"{shape} text" for shape in sorted(SHAPES)
    ]


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_frames_one_after_another_are_one_text(tmp_path: Path, compression: str) -> None:
    parts = [packed(shaped(TEXTS[start : start + 5], "jsonl"), compression) for start in range(0, 20, 5)]
    (tmp_path / f"a.jsonl{compression}").write_bytes(b"".join(parts))
    (opened,) = open_sources([f"a.jsonl{compression}"], tmp_path)
    assert [document.text for document in opened.documents()] == TEXTS


@pytest.mark.parametrize("compression", [".gz", ".zst"])
@pytest.mark.parametrize("shape", ["txt", "jsonl", "parquet"])
def test_a_file_cut_short_is_refused_by_name(tmp_path: Path, shape: str, compression: str) -> None:
    content = packed(shaped([text * 50 for text in TEXTS], shape), compression)
    (tmp_path / f"a.{shape}{compression}").write_bytes(content[: len(content) // 2])
    with pytest.raises(InvalidCorpus, match=rf"a\.{shape}.*cannot be read"):
        for source in open_sources([f"a.{shape}{compression}"], tmp_path):
            list(source.pieces())


def test_bad_lines_are_rejected_by_kind_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_reader, "LONGEST_LINE_BYTES", 60)
    lines = [
        b'{"text": "good"}',
        b"",
        b'{"text": "bad \xff"}',
        b'{"text": ',
        b'{"other": "\xc3\xa4"}',
        b'{"text": null}',
        b'{"text": ["no", "string"]}',
        b'{"text": " \\n "}',
        b'{"text": "' + b"x" * 100 + b'"}',
        b'{"text": "good again"}',
        b"[1, 2]",
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\r\n".join(lines))
    (source,) = open_sources(["a.jsonl"], tmp_path)
    pieces = list(source.pieces())
    kinds = [piece.kind if isinstance(piece, RejectedRow) else piece.text for piece in pieces]
    assert kinds == [
        "good",
        "not-utf8",
        "not-json",
        "missing-field",
        "missing-field",
        "not-a-string",
        "empty",
        "too-long",
        "good again",
        "not-json",
    ]
    content = b"\r\n".join(lines)
    given = [line for line in lines if line]
    assert all(content[p.offset_bytes :].startswith(line) for p, line in zip(pieces, given, strict=True))


def column(values: list[bytes | None]) -> bytes:
    """Return a Parquet file with one column `body`."""
    sink = io.BytesIO()
    parquet.write_table(pa.table({"body": pa.array(values, type=pa.binary())}), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        (
            "a.parquet",
            column([b"good", None, b"bad \xff", b"  ", b"x" * 100, b"good again"]),
            ["good", "missing-field", "not-utf8", "empty", "too-long", "good again"],
        ),
        ("a.csv", b'body,n\n"good, row",1\n"  ",2\n\xff,3\ngood,4\n', ["good, row", "empty", "not-utf8", "good"]),
    ],
)
def test_bad_rows_are_rejected_by_kind_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, rows: list[str]
) -> None:
    monkeypatch.setattr(document_reader, "LONGEST_LINE_BYTES", 60)
    (tmp_path / name).write_bytes(content)
    (source,) = open_sources([name], tmp_path, text_field="body")
    pieces = [(p.offset_bytes, p.kind if isinstance(p, RejectedRow) else p.text) for p in source.pieces()]
    assert pieces == list(enumerate(rows))


@pytest.mark.parametrize(
    ("name", "field", "kind"),
    [
        ("a.parquet", "absent", "missing-field"),
        ("a.parquet", "number", "not-a-string"),
        ("a.csv", "absent", "missing-field"),
    ],
)
def test_a_table_without_a_column_of_text_has_no_good_row(tmp_path: Path, name: str, field: str, kind: str) -> None:
    content = shaped(TEXTS, "parquet") if name == "a.parquet" else b"text\n" + b"a\n" * 20
    assert rejected(tmp_path / name, content, text_field=field) == {kind: 20}


@pytest.mark.parametrize(("content", "kind"), [(b"\xff", "not-utf8"), (b" \n", "empty")])
def test_a_bad_file_among_documents_is_one_rejected_document(tmp_path: Path, content: bytes, kind: str) -> None:
    assert rejected(tmp_path / "a.txt", content, split="documents") == {kind: 1}


def test_a_detail_is_never_longer_than_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": 1}))
    (source,) = open_sources(["a.jsonl"], tmp_path, text_field="t" * 500)
    (piece,) = source.pieces()
    assert isinstance(piece, RejectedRow) and len(piece.detail) == 200


def test_the_field_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"Ein Feld – mit Namen": "good", "text": 3}')
    (source,) = open_sources(["a.jsonl"], tmp_path, text_field="Ein Feld – mit Namen")
    assert [piece.text for piece in source.pieces() if isinstance(piece, Document)] == ["good"]


@given(lines=st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=8))
def test_a_line_longer_than_the_bound_moves_no_other(lines: list[bytes]) -> None:
    content = b"\n".join(lines)
    found = list(lines_of(io.BytesIO(content), 4))
    assert [offset for offset, _ in found] == [offset for offset, _ in lines_of(io.BytesIO(content), 100)]
    assert all(content[offset : offset + len(line)] == line for offset, line in found)
    assert all(len(line) <= 6 for _, line in found)


@pytest.mark.parametrize("shape", ["jsonl", "parquet", "jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("later", ["other", "cut"])
def test_a_source_that_changes_after_its_check_is_refused(tmp_path: Path, shape: str, later: str) -> None:
    inner, _, compression = shape.partition(".")
    path = tmp_path / f"a.{shape}"
    before = packed(shaped(TEXTS, inner), f".{compression}" if compression else "")
    after = packed(shaped(TEXTS[::-1], inner), f".{compression}" if compression else "")
    path.write_bytes(before)
    (source,) = open_sources([path.name], tmp_path)
    path.write_bytes(after if later == "other" else before[:-20])
    with pytest.raises(InvalidCorpus, match="changed while it was read"):
        list(source.pieces())


PIECE = 64
GAP = " " * 5 * PIECE
LONG = {
    "in the middle": f"to be{GAP}or not",
    "at the beginning": f"{GAP}to be",
    "at the end": f"to be{GAP}",
    "in lines": "to be" + "\n" * 5 * PIECE + "or not",
}
SHAPES_OF_BLANKS = ("jsonl", "parquet", "txt")


def written(folder: Path, shape: str, text: str) -> list[Document | RejectedRow]:
    """Return the pieces of a file that holds this text, and of a text file all of it."""
    (folder / f"a.{shape}").write_bytes(text.encode() if shape == "txt" else shaped([text], shape))
    (source,) = open_sources([f"a.{shape}"], folder, max_document_bytes=PIECE, split="documents")
    return list(source.pieces())


@pytest.mark.parametrize("shape", SHAPES_OF_BLANKS)
@pytest.mark.parametrize("where", LONG)
def test_a_piece_of_white_space_in_a_long_document_is_kept(shape: str, where: str, tmp_path: Path) -> None:
    pieces = written(tmp_path, shape, LONG[where])
    assert "".join(piece.text for piece in pieces if isinstance(piece, Document)) == LONG[where]


@pytest.mark.parametrize("shape", SHAPES_OF_BLANKS)
@pytest.mark.parametrize("size", [3, 5 * PIECE])
def test_a_document_of_nothing_but_white_space_is_left_out(shape: str, size: int, tmp_path: Path) -> None:
    pieces = written(tmp_path, shape, " " * size)
    assert pieces and {piece.kind for piece in pieces if isinstance(piece, RejectedRow)} == {RejectionKind.EMPTY}
    assert not any(isinstance(piece, Document) for piece in pieces)


def test_what_is_held_of_a_blank_beginning_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_reader, "_MOST_BLANK_PIECES", 3)
    kept = [piece for piece in written(tmp_path, "txt", " " * 9 * PIECE) if isinstance(piece, Document)]
    assert sum(len(piece.text) for piece in kept) == 9 * PIECE
