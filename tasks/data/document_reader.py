"""Reads the documents of one open file: text, lines or an array of JSON, Parquet, CSV or TSV; also compressed.

It is in memory for one line, element, row or piece. Sources: RFC 1952 (gzip), RFC 8878 (Zstandard), jsonlines.org,
Apache Parquet, RFC 4180 (CSV).
"""

import codecs
import csv
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any, BinaryIO, cast

import msgspec
import pyarrow as pa

from cairn.model.configuration.data import DataConfig
from cairn.storage.snapshots.parquet_process import COLUMNS, ROWS, most_bytes, read_parquet
from cairn.storage.snapshots.snapshot_manifest import RejectedRow, SplitName
from cairn.tasks.data import chat_template, conversation
from cairn.tasks.data.document import InvalidCorpus, Piece, is_expressible, make_document
from cairn.tasks.data.rejection import RejectionKind
from cairn.tasks.data.text_format import CHUNK_BYTES, TextFormat, elements_of, lines_of, pieces_of, skip_mark
from cairn.tasks.text.format import format_list

WHOLE_FILE = "whole file"
HELD_OUT_END = "text whose end is held out"
SEPARATED = "part between separators"
LINE = "line"
ROW = "row"
EMPTY_FILE = "empty file"
UNITS = {TextFormat.TEXT: WHOLE_FILE, TextFormat.JSON_LINES: LINE, TextFormat.JSON: "element"}
"""The kind of document in a file of this format; of a table of any kind it is a row."""
LONGEST_LINE_BYTES = 64 * 1024 * 1024
"""A longer line or element of JSON, or row, is rejected, because it is held in memory as a whole."""
_CSV_BLOCK_BYTES = 16 << 20
_DELIMITERS = {TextFormat.CSV: ",", TextFormat.TSV: "\t"}
_DETAIL_CHARACTERS = 200
_SHOWN_FIELDS = 12
_MOST_BLANK_PIECES = 256
"""More white space than this at the beginning of a text is taken for a part of it: it is held in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """A file of a source: `place` is its full path or URL, `bytes` its size, `unit` its kind of document.

    `name` is the same on every machine: the path from the folder that all files have in common, or the URL.
    `is_matched` says that a glob found it; `placed` is the split of all its documents where the configuration says it;
    `template` renders its conversations.
    """

    source: str
    place: str
    bytes: int
    opener: Callable[[], BinaryIO]
    unit: str = WHOLE_FILE
    format: TextFormat = TextFormat.TEXT
    codec: str = ""
    name: str = ""
    group: str = ""
    is_matched: bool = False
    placed: SplitName | None = None
    template: chat_template.ChatTemplate | None = None

    def invalid(self, problem: str, rule: str) -> InvalidCorpus:
        """Return the error that names source, file, problem and rule."""
        return invalid_source(self.source, f"file {self.place}: {problem}", rule, placed=self.placed)

    def unreadable(self, problem: Exception) -> InvalidCorpus:
        """Return the error of a file that cannot be read, with the remedy where one is known."""
        what = f"cannot be read as {self.codec}" if self.codec else "cannot be read"
        is_too_wide = self.codec == "zstd" and "memory" in str(problem)  # compressed with --long above 27
        remedy = ". Compress it again without --long" if is_too_wide else ""
        return self.invalid(f"{what} ({problem})", f"every source is readable{remedy}")


def invalid_source(source: str, problem: str, rule: str, *, placed: SplitName | None) -> InvalidCorpus:
    """Return the error that names an entry of `data.sources`, or of `data.val_sources`, the problem and the rule."""
    key = "data.val_sources" if placed == "val" else "data.sources"
    return InvalidCorpus(f"{key} = {source!r}: {problem}; rule: {rule}")


def decompress(stream: BinaryIO, codec: str, stored_bytes: int) -> BinaryIO:
    """Return the text; reading damaged or far too long bytes raises OSError or ArrowException."""
    most, size_bytes = most_bytes(stored_bytes), 0

    def require_few(content: bytes) -> None:
        nonlocal size_bytes
        size_bytes += len(content)
        if codec and size_bytes > most:
            problem = f"its {stored_bytes:,} bytes become more than {most:,}"
            raise OSError(f"{problem}; decompress it where you trust it")

    # Without PythonFile pyarrow would close the caller's stream.
    text = pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), codec) if codec else stream
    return cast(BinaryIO, io.BufferedReader(WatchedStream(text, require_few), CHUNK_BYTES))


class WatchedStream(io.RawIOBase):
    """Reads forward from a stream that its opener closes, and counts its bytes; `watch` gets all that is read."""

    mode = "rb"  # pyarrow asks for it

    def __init__(self, inner: Any, watch: Callable[[bytes], object]) -> None:
        self._inner, self._watch, self.bytes = inner, watch, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, target: Any) -> int:
        """Read into `target`; returns how many bytes."""
        content = self._inner.read(len(target))
        self.bytes += len(content)
        self._watch(content)
        target[: len(content)] = content
        return len(content)


def read_pieces(
    stream: BinaryIO, file: TextFile, data: DataConfig, *, border: int | None, text_bytes: int
) -> Iterator[Piece]:
    """Yield the documents and rejected documents of an open file in order."""
    reader = _Reader(file=file, data=data)
    if file.unit == EMPTY_FILE:
        yield reader.rejected(0, RejectionKind.EMPTY_FILE, "a file without text among those of a glob")
    elif file.format == TextFormat.PARQUET and not file.codec and "://" not in file.place:
        yield from reader.table(stream)
        return
    text = decompress(stream, file.codec, file.bytes)
    if file.format == TextFormat.PARQUET:
        # Another process reads Parquet, from the end of the file: a compressed or remote one is copied first.
        with tempfile.TemporaryFile() as table:
            shutil.copyfileobj(text, table, CHUNK_BYTES)
            table.seek(0)
            yield from reader.table(cast(BinaryIO, table))
    elif file.format in (TextFormat.CSV, TextFormat.TSV):
        yield from reader.separated_values(text, _DELIMITERS[file.format])
    elif file.format == TextFormat.JSON_LINES:
        yield from reader.json_values(lines_of(text, LONGEST_LINE_BYTES, skip_mark(text)))
    elif file.format == TextFormat.JSON:
        yield from reader.json_values(elements_of(text, LONGEST_LINE_BYTES))
    elif file.unit == HELD_OUT_END and border is not None:
        yield from reader.text_with_border(text, border, text_bytes)
    elif file.unit == SEPARATED:
        yield from reader.parts(text)
    elif file.unit == WHOLE_FILE:
        yield from reader.whole_text(pieces_of(text, data.max_document_bytes, begin=skip_mark(text)))
    while text.read(CHUNK_BYTES):
        pass  # the hash needs every byte


def describe_places(stream: BinaryIO, file: TextFile, offsets: Collection[int]) -> Mapping[int, str]:
    """Return where in an open file documents are, and the fields that are there, for a message."""
    if file.format != TextFormat.JSON_LINES:
        columns = ""
        if file.format == TextFormat.PARQUET and not file.codec and "://" not in file.place:
            with_columns = read_parquet(stream, [])
            columns = f", columns {_quoted(json.loads(next(with_columns).schema.metadata[COLUMNS]))}"
            with_columns.close()
        elif file.format in (TextFormat.CSV, TextFormat.TSV):
            header = decompress(stream, file.codec, file.bytes).readline(CHUNK_BYTES).decode("utf-8-sig", "replace")
            columns = f", columns {_quoted(next(csv.reader([header], delimiter=_DELIMITERS[file.format]), []))}"
        return {at: f"row {at + 1}{columns}" if file.unit == ROW else f"byte {at}" for at in offsets}
    text, found, last = decompress(stream, file.codec, file.bytes), dict[int, str](), max(offsets, default=-1)
    for number, (begin, line) in enumerate(lines_of(text, LONGEST_LINE_BYTES, skip_mark(text)), 1):
        if begin in offsets:
            fields = _parse_leniently(line)
            found[begin] = f"line {number}" + (f", fields {_quoted(fields)}" if fields else "")
        if begin >= last:
            break
    return {at: f"byte {at}" for at in offsets} | found


def _quoted(names: Iterable[str]) -> str:
    return format_list([repr(name) for name in names], _SHOWN_FIELDS) or "none"


def _parse_leniently(line: bytes) -> Mapping[str, object]:
    """Return the fields of a line with NaN, lone surrogates or foreign bytes in some of them; empty if it is no object.

    A document is not thrown away for a field that nobody reads.
    """
    try:
        found = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    file: TextFile
    data: DataConfig

    def text_with_border(self, text: BinaryIO, border: int, text_bytes: int) -> Iterator[Piece]:
        for offset, content in pieces_of(text, self.data.max_document_bytes, border, begin=skip_mark(text)):
            ends = offset + len(content) >= text_bytes or offset < border <= offset + len(content)
            yield self.document(offset, content, placed="train" if offset < border else "val", ends=ends)

    def whole_text(self, pieces: Iterable[tuple[int, bytes]]) -> Iterator[Piece]:
        """Yield the pieces of one text; white space is a piece of it, and rejected only where there is nothing else."""
        blank, has_text = list[tuple[int, bytes]](), False
        for offset, content in pieces:
            has_text = has_text or bool(content.strip()) or len(blank) == _MOST_BLANK_PIECES
            blank.append((offset, content))
            if has_text:
                yield from (self.document(*piece, is_piece=True) for piece in blank)
                blank.clear()
        for piece in blank:
            yield self.document(*piece)

    def document(
        self, offset: int, content: bytes, placed: SplitName | None = None, *, ends: bool = True, is_piece: bool = False
    ) -> Piece:
        if placed is None and not is_piece and not content.strip():
            return self.rejected(offset, RejectionKind.EMPTY, "no text but white space")
        try:
            return make_document(self.file.name, offset, content, placed=placed or self.file.placed, ends=ends)
        except UnicodeDecodeError as problem:
            return self._not_utf8(offset, problem)

    def parts(self, text: BinaryIO) -> Iterator[Piece]:
        """Yield the texts between lines that are the separator; white space alone is none."""
        separator, content = self.data.separator.encode(), bytearray()
        begin = skip_mark(text)
        for offset, line in chain(lines_of(text, LONGEST_LINE_BYTES, begin), [(-1, separator)]):
            is_separator = line.rstrip(b"\r\n") == separator
            if content and (is_separator or len(content) + len(line) > LONGEST_LINE_BYTES):
                if whole := bytes(content).strip(b"\r\n"):
                    yield from self._value(begin + content.index(whole[:1]), whole)
                content.clear()
            if not is_separator:
                begin = begin if content else offset
                content += line

    def conversations(self, rows: Iterable[tuple[int, bytes]]) -> Iterator[Piece]:
        for row in conversation.render_rows(rows, self.file.template):
            if row.kind:
                yield self.rejected(row.offset_bytes, RejectionKind(row.kind), row.detail)
                continue
            content, placed = row.text.encode("utf-8"), self.file.placed
            yield make_document(self.file.name, row.offset_bytes, content, placed=placed, answers=row.answers)

    def json_values(self, values: Iterable[tuple[int, bytes]]) -> Iterator[Piece]:
        if self.data.loss_on:
            yield from self.conversations((offset, line) for offset, line in values if line.strip())
            return
        # A struct of one field: msgspec skips the others without making objects.
        field: Any = msgspec.defstruct("Line", [("text", Any, msgspec.UNSET)], rename={"text": self.data.text_field})
        for offset, line in values:
            if not line.strip():
                continue
            value: object = (line := line.rstrip(b"\r\n"))
            try:
                if len(line) <= LONGEST_LINE_BYTES:
                    value = self._field_of(line, field)
            except UnicodeDecodeError as problem:
                yield self._not_utf8(offset, problem)
            except UnicodeEncodeError as problem:  # a lone surrogate is legal in an escape, but not in UTF-8
                yield self.rejected(offset, RejectionKind.NOT_UTF8, str(problem))
            except (msgspec.DecodeError, RecursionError) as problem:
                yield self.rejected(offset, RejectionKind.NOT_JSON, str(problem))
            else:
                yield from self._value(offset, value)

    def _field_of(self, line: bytes, field: Any) -> object:
        """Return the field's value, a text as bytes."""
        try:
            line.decode("utf-8")  # the parser does not check skipped fields
            value = msgspec.json.decode(line, type=field).text
        except (UnicodeDecodeError, msgspec.DecodeError) as problem:
            if line.startswith(codecs.BOM_UTF8):  # of a file that was joined to another
                return self._field_of(line.removeprefix(codecs.BOM_UTF8), field)
            value = _parse_leniently(line).get(self.data.text_field, msgspec.UNSET)
            is_foreign = isinstance(problem, UnicodeDecodeError)
            if value is msgspec.UNSET or (is_foreign and isinstance(value, str) and not is_expressible(value)):
                raise
        return value.encode("utf-8") if isinstance(value, str) else value

    def separated_values(self, text: BinaryIO, delimiter: str) -> Iterator[Piece]:
        from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, open_csv  # slow to import

        name = self.data.text_field
        read = ReadOptions(block_size=_CSV_BLOCK_BYTES, use_threads=False)
        parse = ParseOptions(delimiter=delimiter, newlines_in_values=True)
        wanted: Any = {"include_columns": [name], "column_types": {name: pa.large_binary()}}
        convert = ConvertOptions(**wanted, strings_can_be_null=False, include_missing_columns=True)
        quotes = list[int]()
        counted = WatchedStream(text, lambda content: quotes.append(content.count(b'"')))
        batches = open_csv(pa.PythonFile(counted, mode="r"), read, parse, convert)
        values, value = chain.from_iterable(batch.column(0).to_pylist() for batch in batches), b""
        for row, value in enumerate(values):
            yield from self._value(row, value)
        if sum(quotes) % 2 and b"\n" in (value or b""):  # pyarrow takes an open quote for text
            raise pa.ArrowInvalid("a quote is open to its end, so that the last row holds all that comes after it")

    def table(self, file: BinaryIO) -> Iterator[Piece]:
        batches = read_parquet(file, conversation.FIELDS if self.data.loss_on else [self.data.text_field])
        schema = next(batches).schema
        count = int(schema.metadata[ROWS])
        if self.data.loss_on:
            found = chain.from_iterable(batch.to_pylist() for batch in batches)
            rows = enumerate(found if schema.names else repeat(dict[str, Any](), count))
            as_text = partial(json.dumps, default=lambda content: content.decode("utf-8", "surrogateescape"))
            yield from self.conversations((row, as_text(values).encode()) for row, values in rows)
            return
        values: Iterable[object] = repeat(schema.types[0] if schema.names else None, count)
        if schema.types == [pa.large_binary()]:
            values = chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
        for row, value in enumerate(values):
            yield from self._value(row, value)

    def _value(self, offset: int, value: object) -> Iterator[Piece]:
        """Yield the documents of the field's value, the bytes of a text, or why it has none."""
        field, kind = self.data.text_field, str(value) if isinstance(value, pa.DataType) else type(value).__name__
        if value is None or value is msgspec.UNSET:
            yield self.rejected(offset, RejectionKind.MISSING_FIELD, f"no field {field!r}, or null in it")
        elif not isinstance(value, bytes):
            yield self.rejected(offset, RejectionKind.NOT_A_STRING, f"field {field!r} is {kind}, not a string")
        elif len(value) > LONGEST_LINE_BYTES:
            yield self.rejected(offset, RejectionKind.TOO_LONG, f"longer than {LONGEST_LINE_BYTES} bytes")
        elif len(value) <= self.data.max_document_bytes:
            yield self.document(offset, value)
        else:
            pieces = pieces_of(io.BytesIO(value), self.data.max_document_bytes)
            yield from self.whole_text((offset, piece) for _, piece in pieces)

    def _not_utf8(self, offset: int, problem: UnicodeDecodeError) -> RejectedRow:
        byte, start = problem.object[problem.start], problem.start
        detail = f"undecodable byte 0x{byte:02x}, {start} bytes into it ({problem.reason})"
        return self.rejected(offset, RejectionKind.NOT_UTF8, detail)

    def rejected(self, offset: int, kind: RejectionKind, detail: str) -> RejectedRow:
        return RejectedRow(source=self.file.name, offset_bytes=offset, kind=kind, detail=detail[:_DETAIL_CHARACTERS])
