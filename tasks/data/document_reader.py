"""Reads the documents of one open file (text, lines of JSON, or Parquet) in memory for one document."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, cast

import msgspec
import pyarrow as pa

from storage.snapshots.parquet_process import ROWS, read_parquet
from tasks.data.document import Piece, Rejected, RejectionKind, make_document
from tasks.data.text_format import BLOCKS, CHUNK_BYTES, LINE, ROW, Compression, decompress

MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
_DETAIL_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingRules:
    """The field that holds the text, and the longest document."""

    text_field: str = "text"
    max_document_bytes: int = MAX_DOCUMENT_BYTES


def read_pieces(
    stream: BinaryIO, name: str, unit: str, compression: Compression, stored_bytes: int, rules: ReadingRules
) -> Iterator[Piece]:
    """Yield the documents and rejected documents of an open file of `stored_bytes` in order."""
    reader = _Reader(name=name, rules=rules)
    if unit == ROW and compression is Compression.NONE and _has_descriptor(stream):
        yield from reader.table(stream)
        return
    text = decompress(stream, compression, stored_bytes)
    if unit == ROW:
        # Another process reads Parquet, from the end of the file: a compressed or remote one is copied first.
        with tempfile.TemporaryFile() as table:
            shutil.copyfileobj(text, table, CHUNK_BYTES)
            table.seek(0)
            yield from reader.table(cast(BinaryIO, table))
    elif unit == LINE:
        yield from reader.json_lines(text)
    else:
        longest = rules.max_document_bytes
        blocks = blocks_of(text, longest) if unit == BLOCKS else [(0, text.read(longest + 1))]
        for offset, content in blocks:
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


def blocks_of(lines: BinaryIO | Iterator[bytes], longest: int = MAX_DOCUMENT_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in bytes, content) of each run of lines with text; a longer block is cut behind `longest` bytes."""
    offset, start, length = 0, 0, 0
    block: list[bytes] = []
    given = lines if isinstance(lines, Iterator) else iter(lambda: lines.readline(longest + 2), b"")
    for line in chain(given, [b""]):  # the empty line ends the last block
        if line.strip():
            start = start if block else offset
            if length <= longest + 2:  # two more for the line end, which is removed
                block.append(line)
            length += len(line)
        elif block:
            yield start, b"".join(block).rstrip(b"\r\n")
            block, length = [], 0
        offset += len(line)


def _has_descriptor(stream: BinaryIO) -> bool:
    try:
        return stream.fileno() >= 0
    except (OSError, AttributeError):
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    name: str
    rules: ReadingRules

    def text(self, offset: int, content: bytes) -> Piece:
        if len(content) > self.rules.max_document_bytes:
            return self._too_long(offset)
        if not content.strip():
            return self._rejected(offset, RejectionKind.EMPTY, "no text but white space")
        try:
            return make_document(self.name, offset, content)
        except UnicodeDecodeError as problem:
            return self._not_utf8(offset, problem)

    def json_lines(self, text: BinaryIO) -> Iterator[Piece]:
        # A struct of one field: msgspec skips the others without making objects.
        field = msgspec.defstruct("Line", [("text", Any, msgspec.UNSET)], rename={"text": self.rules.text_field})
        for offset, line in lines_of(text, self.rules.max_document_bytes):
            if line.strip():
                yield self._json(offset, line.rstrip(b"\r\n"), field)

    def table(self, file: BinaryIO) -> Iterator[Piece]:
        batches = read_parquet(file, [self.rules.text_field])
        schema = next(batches).schema
        rows = range(int(schema.metadata[ROWS]))
        if not schema.names:
            yield from map(self._missing, rows)
        elif (kind := schema.types[0]) != pa.large_binary():
            yield from (self._not_a_string(row, str(kind)) for row in rows)
        else:
            columns = (batch.column(0).to_pylist() for batch in batches)
            for row, content in enumerate(chain.from_iterable(columns)):
                yield self._missing(row) if content is None else self.text(row, content)

    def _json(self, offset: int, line: bytes, field: Any) -> Piece:
        if len(line) > self.rules.max_document_bytes:
            return self._too_long(offset)
        try:
            line.decode("utf-8")  # the parser does not check skipped fields
            text = msgspec.json.decode(line, type=field).text
        except UnicodeDecodeError as problem:
            return self._not_utf8(offset, problem)
        except (msgspec.DecodeError, RecursionError) as problem:
            return self._rejected(offset, RejectionKind.NOT_JSON, str(problem))
        if text is msgspec.UNSET or text is None:
            return self._missing(offset)
        if not isinstance(text, str):
            return self._not_a_string(offset, type(text).__name__)
        if not text.strip():
            return self._rejected(offset, RejectionKind.EMPTY, "no text but white space")
        try:
            return make_document(self.name, offset, text.encode("utf-8"), text)
        except UnicodeEncodeError as problem:  # a lone surrogate is legal in an escape, but not in UTF-8
            return self._rejected(offset, RejectionKind.NOT_UTF8, str(problem))

    def _not_utf8(self, offset: int, problem: UnicodeDecodeError) -> Rejected:
        byte, start = problem.object[problem.start], problem.start
        detail = f"undecodable byte 0x{byte:02x}, {start} bytes into it ({problem.reason})"
        return self._rejected(offset, RejectionKind.NOT_UTF8, detail)

    def _too_long(self, offset: int) -> Rejected:
        return self._rejected(offset, RejectionKind.TOO_LONG, f"longer than {self.rules.max_document_bytes} bytes")

    def _missing(self, offset: int) -> Rejected:
        detail = f"no field {self.rules.text_field!r}, or null in it"
        return self._rejected(offset, RejectionKind.MISSING_FIELD, detail)

    def _not_a_string(self, offset: int, found: str) -> Rejected:
        detail = f"field {self.rules.text_field!r} is {found}, not a string"
        return self._rejected(offset, RejectionKind.NOT_A_STRING, detail)

    def _rejected(self, offset: int, kind: RejectionKind, detail: str) -> Rejected:
        return Rejected(source=self.name, offset_bytes=offset, kind=kind, detail=detail[:_DETAIL_CHARACTERS])
