"""Reads the documents of one open file (text, lines of JSON, or Parquet) in memory for one line, row or piece."""

import io
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, cast

import msgspec
import pyarrow as pa

from cairn.model.configuration.data import DataConfig
from cairn.storage.snapshots.document_index import SplitName
from cairn.storage.snapshots.parquet_process import ROWS, read_parquet
from cairn.tasks.data.document import Piece, Rejected, RejectionKind, make_document
from cairn.tasks.data.source_listing import CHUNK_BYTES, HELD_OUT_END, LINE, ROW, Compression, TextFile, decompress

LONGEST_LINE_BYTES = 64 * 1024 * 1024
"""A longer line of JSON, or row, is rejected, because it is held in memory as a whole."""
_DETAIL_CHARACTERS = 200
_PARAGRAPHS_AND_LINES = (b"\n\n", b"\n\r\n", b"\n")
_LONGEST_CHARACTER_BYTES = 4


def read_pieces(
    stream: BinaryIO, file: TextFile, data: DataConfig, *, border: int | None, text_bytes: int
) -> Iterator[Piece]:
    """Yield the documents and rejected documents of an open file in order."""
    reader = _Reader(name=file.name, data=data)
    if file.unit == ROW and file.compression is Compression.NONE and _has_descriptor(stream):
        yield from reader.table(stream)
        return
    text = decompress(stream, file.compression, file.bytes)
    if file.unit == ROW:
        # Another process reads Parquet, from the end of the file: a compressed or remote one is copied first.
        with tempfile.TemporaryFile() as table:
            shutil.copyfileobj(text, table, CHUNK_BYTES)
            table.seek(0)
            yield from reader.table(cast(BinaryIO, table))
    elif file.unit == LINE:
        yield from reader.json_lines(text)
    elif file.unit == HELD_OUT_END and border is not None:
        yield from reader.text_with_border(text, border, text_bytes)
    else:
        for offset, content in pieces_of(text, data.max_document_bytes):
            yield reader.text(offset, content)
    while text.read(CHUNK_BYTES):
        pass  # the hash needs every byte


def lines_of(stream: BinaryIO, longest: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line with its end) of every line; a line longer than `longest` bytes is cut."""
    offset = 0
    while line := stream.readline(longest + 2):
        length, ended = len(line), line.endswith(b"\n")
        while not ended and length >= longest + 2 and (rest := stream.readline(CHUNK_BYTES)):
            length, ended = length + len(rest), rest.endswith(b"\n")
        yield offset, line
        offset += length


def _has_descriptor(stream: BinaryIO) -> bool:
    try:
        return stream.fileno() >= 0
    except (OSError, AttributeError):
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    name: str
    data: DataConfig

    def text_with_border(self, text: BinaryIO, border: int, text_bytes: int) -> Iterator[Piece]:
        for offset, content in pieces_of(text, self.data.max_document_bytes, border):
            ends = offset + len(content) >= text_bytes or offset < border <= offset + len(content)
            yield self._document(offset, content, placed="train" if offset < border else "val", ends=ends)

    def text_in_pieces(self, offset: int, content: bytes) -> Iterator[Piece]:
        if len(content) > LONGEST_LINE_BYTES:
            yield self._too_long(offset)
        elif len(content) <= self.data.max_document_bytes:
            yield self.text(offset, content)
        else:
            for _, piece in pieces_of(io.BytesIO(content), self.data.max_document_bytes):
                yield self.text(offset, piece)

    def text(self, offset: int, content: bytes) -> Piece:
        if not content.strip():
            return self._rejected(offset, RejectionKind.EMPTY, "no text but white space")
        return self._document(offset, content)

    def _document(self, offset: int, content: bytes, placed: SplitName | None = None, ends: bool = True) -> Piece:
        try:
            return make_document(self.name, offset, content, placed=placed, ends=ends)
        except UnicodeDecodeError as problem:
            return self._not_utf8(offset, problem)

    def json_lines(self, text: BinaryIO) -> Iterator[Piece]:
        # A struct of one field: msgspec skips the others without making objects.
        field = msgspec.defstruct("Line", [("text", Any, msgspec.UNSET)], rename={"text": self.data.text_field})
        for offset, line in lines_of(text, LONGEST_LINE_BYTES):
            if line.strip():
                found = self._field_of(offset, line.rstrip(b"\r\n"), field)
                yield from [found] if isinstance(found, Rejected) else self.text_in_pieces(offset, found)

    def table(self, file: BinaryIO) -> Iterator[Piece]:
        batches = read_parquet(file, [self.data.text_field])
        schema = next(batches).schema
        rows = range(int(schema.metadata[ROWS]))
        if not schema.names:
            yield from map(self._missing, rows)
        elif (kind := schema.types[0]) != pa.large_binary():
            yield from (self._not_a_string(row, str(kind)) for row in rows)
        else:
            columns = (batch.column(0).to_pylist() for batch in batches)
            for row, content in enumerate(chain.from_iterable(columns)):
                yield from [self._missing(row)] if content is None else self.text_in_pieces(row, content)

    def _field_of(self, offset: int, line: bytes, field: Any) -> bytes | Rejected:
        if len(line) > LONGEST_LINE_BYTES:
            return self._too_long(offset)
        try:
            line.decode("utf-8")  # the parser does not check skipped fields
            text = msgspec.json.decode(line, type=field).text
            if text is msgspec.UNSET or text is None:
                return self._missing(offset)
            return text.encode("utf-8") if isinstance(text, str) else self._not_a_string(offset, type(text).__name__)
        except UnicodeDecodeError as problem:
            return self._not_utf8(offset, problem)
        except UnicodeEncodeError as problem:  # a lone surrogate is legal in an escape, but not in UTF-8
            return self._rejected(offset, RejectionKind.NOT_UTF8, str(problem))
        except (msgspec.DecodeError, RecursionError) as problem:
            return self._rejected(offset, RejectionKind.NOT_JSON, str(problem))

    def _not_utf8(self, offset: int, problem: UnicodeDecodeError) -> Rejected:
        byte, start = problem.object[problem.start], problem.start
        detail = f"undecodable byte 0x{byte:02x}, {start} bytes into it ({problem.reason})"
        return self._rejected(offset, RejectionKind.NOT_UTF8, detail)

    def _too_long(self, offset: int) -> Rejected:
        return self._rejected(offset, RejectionKind.TOO_LONG, f"longer than {LONGEST_LINE_BYTES} bytes")

    def _missing(self, offset: int) -> Rejected:
        detail = f"no field {self.data.text_field!r}, or null in it"
        return self._rejected(offset, RejectionKind.MISSING_FIELD, detail)

    def _not_a_string(self, offset: int, found: str) -> Rejected:
        field = self.data.text_field
        return self._rejected(offset, RejectionKind.NOT_A_STRING, f"field {field!r} is {found}, not a string")

    def _rejected(self, offset: int, kind: RejectionKind, detail: str) -> Rejected:
        return Rejected(source=self.name, offset_bytes=offset, kind=kind, detail=detail[:_DETAIL_CHARACTERS])


def pieces_of(text: BinaryIO, longest: int, border: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in bytes, content) of each piece of a text, cut at a paragraph or a line where there is one.

    A piece has at most `longest` bytes, and a character's rest where the piece ends at `border`: no piece lies on both
    sides of it, and none begins or ends within a UTF-8 character.
    """
    offset, held = 0, b""
    while held := held + text.read(longest + _LONGEST_CHARACTER_BYTES - len(held)):
        to_border = border - offset if border is not None else 0
        if 0 < to_border <= longest:
            end = next((at for at in range(to_border, len(held)) if _is_start(held[at])), len(held))
        else:
            end = _end_of_piece(held, longest)
        yield offset, held[:end]
        offset, held = offset + end, held[end:]


def _end_of_piece(held: bytes, longest: int) -> int:
    if len(held) <= longest:
        return len(held)
    for mark in _PARAGRAPHS_AND_LINES:
        if (found := held.rfind(mark, longest // 2, longest)) >= 0:
            return found + len(mark)
    ends = range(longest, longest - _LONGEST_CHARACTER_BYTES, -1)
    return next((end for end in ends if _is_start(held[end])), longest)


def _is_start(byte: int) -> bool:
    return byte & 0xC0 != 0x80
