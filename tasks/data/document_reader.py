"""From one open file to its documents: blocks or the whole of a text, lines of JSON, rows of a Parquet table.

Owns what a document is in each shape of file and what makes one bad. Reads forward in bounded memory: at most one
document of ``max_document_bytes`` is held. Refuses to know paths, hashes of files and what becomes of a bad document.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import msgspec
import pyarrow as pa
import pyarrow.parquet as parquet

from tasks.data.document import Document, Piece, Rejected, RejectionKind, document_of
from tasks.data.text_format import CHUNK_BYTES, Compression, Shape, TextFormat, unpacked

MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
PARQUET_BATCH_ROWS = 256
BLOCKS = "blank-line-separated blocks"
WHOLE_FILE = "whole file"
LINE = "line"
ROW = "row"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingRules:
    """What a person may say about reading: the field that holds the text, and how long a document may be."""

    text_field: str = "text"
    max_document_bytes: int = MAX_DOCUMENT_BYTES


def unit_of(text_format: TextFormat, *, named_alone: bool) -> str:
    """Return what a document is in such a file; only of prose does it matter whether a path or a glob names it."""
    if text_format.shape is Shape.JSON_LINES:
        return LINE
    if text_format.shape is Shape.PARQUET:
        return ROW
    return BLOCKS if named_alone else WHOLE_FILE


def read_pieces(
    stream: BinaryIO, name: str, text_format: TextFormat, unit: str, rules: ReadingRules
) -> Iterator[Piece]:
    """Yield the documents and the rejected ones of an open file in order; Parquet needs a stream that seeks."""
    if unit == ROW:
        yield from _rows(stream, name, text_format.compression, rules)
        return
    text = unpacked(stream, text_format.compression)
    if unit == LINE:
        field = _field_type(rules.text_field)
        for offset, line in lines_of(text, rules.max_document_bytes):
            if line.strip():
                yield _from_json(name, offset, line.rstrip(b"\r\n"), field, rules)
        return
    parts = blocks_of(text, rules.max_document_bytes) if unit == BLOCKS else _whole(text, rules.max_document_bytes)
    for offset, content in parts:
        yield _from_text(name, offset, content, rules)


def lines_of(stream: BinaryIO, longest: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line with its end) of every line; of one longer than ``longest`` bytes only the beginning."""
    offset = 0
    while line := stream.readline(longest + 2):
        length, ended = len(line), line.endswith(b"\n")
        while not ended and length >= longest + 2 and (rest := stream.readline(CHUNK_BYTES)):
            length, ended = length + len(rest), rest.endswith(b"\n")
        yield offset, line
        offset += length


def blocks_of(lines: BinaryIO | Iterator[bytes], longest: int = MAX_DOCUMENT_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in bytes, content) of each run of lines that are not blank, without its last line end.

    A line of nothing but white space is blank. Line ends inside a block stay as they are. A block longer than
    ``longest`` bytes comes cut, but still longer than ``longest``.
    """
    offset, start, held = 0, 0, 0
    block: list[bytes] = []
    for line in lines if isinstance(lines, Iterator) else iter(lambda: lines.readline(longest + 2), b""):
        if line.strip():
            start = start if block else offset
            if held <= longest + 2:  # two more, for the line end that is cut off
                block.append(line)
            held += len(line)
        elif block:
            yield start, _without_end(block)
            block, held = [], 0
        offset += len(line)
    if block:
        yield start, _without_end(block)


def _without_end(block: list[bytes]) -> bytes:
    return b"".join(block).rstrip(b"\r\n")


def _whole(text: BinaryIO, longest: int) -> Iterator[tuple[int, bytes]]:
    content = text.read(longest + 1)
    while text.read(CHUNK_BYTES):
        pass  # to the end: what is not read is not hashed either
    yield 0, content


def _from_text(name: str, offset: int, content: bytes, rules: ReadingRules) -> Piece:
    if len(content) > rules.max_document_bytes:
        return _too_long(name, offset, rules)
    if not content.strip():
        return _rejected(name, offset, RejectionKind.EMPTY, "no text but white space")
    try:
        return document_of(name, offset, content)
    except UnicodeDecodeError as problem:
        return _rejected(name, offset, RejectionKind.NOT_UTF8, _undecodable(problem))


def _undecodable(problem: UnicodeDecodeError) -> str:
    return f"undecodable byte 0x{problem.object[problem.start]:02x}, {problem.start} bytes into it ({problem.reason})"


def _too_long(name: str, offset: int, rules: ReadingRules) -> Rejected:
    return _rejected(name, offset, RejectionKind.TOO_LONG, f"longer than {rules.max_document_bytes} bytes")


def _rejected(name: str, offset: int, kind: RejectionKind, detail: str) -> Rejected:
    return Rejected(source=name, offset_bytes=offset, kind=kind, detail=detail)


def _field_type(field: str) -> Any:
    # A struct of the one field: all others are skipped, not made into objects.
    return msgspec.defstruct("Line", [("text", Any, msgspec.UNSET)], rename={"text": field})


def _from_json(name: str, offset: int, line: bytes, field: Any, rules: ReadingRules) -> Piece:
    if len(line) > rules.max_document_bytes:
        return _too_long(name, offset, rules)
    try:
        line.decode("utf-8")  # fields that are skipped are not looked into by the parser
        text = msgspec.json.decode(line, type=field).text
    except UnicodeDecodeError as problem:
        return _rejected(name, offset, RejectionKind.NOT_UTF8, _undecodable(problem))
    except (msgspec.DecodeError, RecursionError) as problem:
        return _rejected(name, offset, RejectionKind.NOT_JSON, str(problem))
    if text is msgspec.UNSET or text is None:
        return _missing(name, offset, rules)
    if not isinstance(text, str):
        return _not_a_string(name, offset, type(text).__name__, rules)
    return _from_string(name, offset, text)


def _from_string(name: str, offset: int, text: str) -> Piece:
    if not text.strip():
        return _rejected(name, offset, RejectionKind.EMPTY, "no text but white space")
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError as problem:  # a lone surrogate, legal in an escape and not in UTF-8
        return _rejected(name, offset, RejectionKind.NOT_UTF8, str(problem))
    digest = hashlib.sha256(content).hexdigest()
    return Document(source=name, offset_bytes=offset, text=text, bytes=len(content), sha256=digest)


def _missing(name: str, offset: int, rules: ReadingRules) -> Rejected:
    return _rejected(name, offset, RejectionKind.MISSING_FIELD, f"no field {rules.text_field!r}, or null in it")


def _not_a_string(name: str, offset: int, found: str, rules: ReadingRules) -> Rejected:
    return _rejected(name, offset, RejectionKind.NOT_A_STRING, f"field {rules.text_field!r} is {found}, not a string")


def _rows(stream: BinaryIO, name: str, compression: Compression, rules: ReadingRules) -> Iterator[Piece]:
    if compression is Compression.NONE:
        yield from _table_rows(stream, name, rules)
        return
    # A table is read from its end: packed as a whole it has to be laid out on disk first.
    with tempfile.TemporaryFile() as table:
        packed = unpacked(stream, compression)
        while chunk := packed.read(CHUNK_BYTES):
            table.write(chunk)
        table.seek(0)
        yield from _table_rows(cast(BinaryIO, table), name, rules)


def _table_rows(stream: BinaryIO, name: str, rules: ReadingRules) -> Iterator[Piece]:
    with parquet.ParquetFile(stream) as table:
        rows, schema = table.metadata.num_rows, table.schema_arrow
        index = schema.get_field_index(rules.text_field)
        if index < 0:
            yield from (_missing(name, row, rules) for row in range(rows))
        elif not _holds_text(kind := schema.field(index).type):
            yield from (_not_a_string(name, row, str(kind), rules) for row in range(rows))
        else:
            yield from _text_rows(table, name, rules)


def _holds_text(kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(kind) for is_kind in (*texts, pa.types.is_binary, pa.types.is_large_binary))


def _text_rows(table: Any, name: str, rules: ReadingRules) -> Iterator[Piece]:
    row = 0
    for batch in table.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[rules.text_field]):
        # As bytes: nothing makes a writer put valid UTF-8 into a string column.
        for content in batch.column(0).cast(pa.large_binary()).to_pylist():
            yield _missing(name, row, rules) if content is None else _from_text(name, row, content, rules)
            row += 1
