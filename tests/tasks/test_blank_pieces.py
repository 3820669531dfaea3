"""White space is a part of the text that it stands in, also where it fills a piece of a long document."""

from pathlib import Path

import pytest

from cairn.storage.snapshots.snapshot_manifest import RejectedRow
from cairn.tasks.data import document_reader
from cairn.tasks.data.document import Document
from cairn.tasks.data.rejection import RejectionKind
from tests.tasks.corpus_files import open_sources, shaped

pytestmark = pytest.mark.usefixtures("forked_parsers")

PIECE = 64
GAP = " " * 5 * PIECE
LONG = {
    "in the middle": f"to be{GAP}or not",
    "at the beginning": f"{GAP}to be",
    "at the end": f"to be{GAP}",
    "in lines": "to be" + "\n" * 5 * PIECE + "or not",
}
SHAPES = ("jsonl", "parquet", "txt")


def written(folder: Path, shape: str, text: str) -> list[Document | RejectedRow]:
    """Return the pieces of a file that holds this text, and of a text file all of it."""
    (folder / f"a.{shape}").write_bytes(text.encode() if shape == "txt" else shaped([text], shape))
    (source,) = open_sources([f"a.{shape}"], folder, max_document_bytes=PIECE, split="documents")
    return list(source.pieces())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", LONG)
def test_a_piece_of_white_space_in_a_long_document_is_kept(shape: str, where: str, tmp_path: Path) -> None:
    pieces = written(tmp_path, shape, LONG[where])
    assert "".join(piece.text for piece in pieces if isinstance(piece, Document)) == LONG[where]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [3, 5 * PIECE])
def test_a_document_of_nothing_but_white_space_is_left_out(shape: str, size: int, tmp_path: Path) -> None:
    pieces = written(tmp_path, shape, " " * size)
    assert pieces and {piece.kind for piece in pieces if isinstance(piece, RejectedRow)} == {RejectionKind.EMPTY}
    assert not any(isinstance(piece, Document) for piece in pieces)


def test_what_is_held_of_a_blank_beginning_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_reader, "_MOST_BLANK_PIECES", 3)
    kept = [piece for piece in written(tmp_path, "txt", " " * 9 * PIECE) if isinstance(piece, Document)]
    assert sum(len(piece.text) for piece in kept) == 9 * PIECE
