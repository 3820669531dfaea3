"""The files that `data.sources` names by paths, globs and URLs, sorted, each once, and the documents in one of them.

An open file (text, lines of JSON, or Parquet; also compressed) is read in memory for one line, row or piece.
Sources: RFC 1952 (gzip), RFC 8878 (Zstandard), jsonlines.org, Apache Parquet.
"""

import glob
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import msgspec
import pyarrow as pa

from cairn.model.configuration.data import DataConfig
from cairn.storage.snapshots.parquet_process import ROWS, most_bytes, read_parquet
from cairn.storage.snapshots.snapshot_manifest import RejectedRow, SplitName
from cairn.storage.stores.redaction import find_credentials
from cairn.tasks.configuration.addresses import READABLE, why_unreadable, wrong_scheme
from cairn.tasks.data.document import InvalidCorpus, Piece, RejectionKind, make_document

CHUNK_BYTES = 1 << 20
WHOLE_FILE = "whole file"
HELD_OUT_END = "text whose end is held out"
LINE = "line"
ROW = "row"
LONGEST_LINE_BYTES = 64 * 1024 * 1024
"""A longer line of JSON, or row, is rejected, because it is held in memory as a whole."""
_DETAIL_CHARACTERS = 200
_PARAGRAPHS_AND_LINES = (b"\n\n", b"\n\r\n", b"\n")
_LONGEST_CHARACTER_BYTES = 4
# They would be read as prose.
_REFUSED_SUFFIXES = frozenset({".bz2", ".xz", ".zip", ".tar", ".tgz", ".tzst", ".arrow", ".feather", ".orc", ".avro"})
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_UNITS = {".jsonl": LINE, ".ndjson": LINE, ".parquet": ROW}


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """A file of a source: `place` is its full path or URL, `bytes` its size, `unit` its kind of document.

    `name` is the same on every machine: the path from the folder that all files have in common, or the URL.
    """

    source: str
    place: str
    bytes: int
    unit: str
    codec: str
    opener: Callable[[], BinaryIO]
    name: str = ""
    group: str = ""

    def invalid(self, problem: str, rule: str) -> InvalidCorpus:
        """Return the error that names source, file, problem and rule."""
        return _invalid(self.source, f"file {self.place}: {problem}", rule)


def find_files(groups: Mapping[str, str], base_dir: Path) -> list[TextFile]:
    """Return every file of the sources once, paths from `base_dir` on, each with the group of its source, or none.

    Raises InvalidCorpus for a source without a file, a format that is not read, and a file of two sources with groups.
    """
    found, kept = list[TextFile](), dict[str, TextFile]()
    for source in groups:
        if "://" in source and (problem := find_credentials(source, instead="the environment")):
            raise InvalidCorpus(f"data.sources: a URL {problem}; rule: sources are written into the log")
        if problem := wrong_scheme(source):
            raise _invalid(source, problem, READABLE)
        pattern, files = _find_remote(source) if "://" in source else _find_local(source, base_dir)
        if not files:
            rule = "a glob matches at least one file. Correct the pattern"
            raise _invalid(source, f"the glob matches no file, looked for {pattern}", rule)
        found += files
    for file in found:
        place = file.place if "://" in file.place else os.path.realpath(file.place)
        first = kept.setdefault(place, file)
        if first.source != file.source and groups[file.source]:
            rule = "with data.weights one source a file, so that it has one weight. Make the globs narrower"
            raise file.invalid(f"also named by data.sources = {first.source!r}", rule)
    local = [os.path.dirname(file.place) for file in kept.values() if "://" not in file.place]
    root = os.path.commonpath(local) if local else ""
    names = [file.place if "://" in file.place else os.path.relpath(file.place, root) for file in kept.values()]
    return [
        replace(file, name=name if "://" in name else Path(name).as_posix(), group=groups[file.source])
        for file, name in zip(kept.values(), names, strict=True)
    ]


def _find_local(source: str, base_dir: Path) -> tuple[str, list[TextFile]]:
    path = os.path.abspath(base_dir / Path(source).expanduser())
    if os.path.isdir(path):
        raise _is_directory(source, path)
    is_file = os.path.isfile(path)
    if not is_file and not glob.has_magic(source):
        rule = f"every source exists. Correct the path (relative paths start at {base_dir})"
        raise _invalid(source, f"no such file, looked at {path}", rule)
    matches = [path] if is_file else sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    return path, [_text_file(source, match, os.path.getsize(match), partial(_open_local, match)) for match in matches]


def _open_local(path: str) -> BinaryIO:
    return open(path, "rb")


def _text_file(source: str, place: str, size_bytes: int, opener: Callable[[], BinaryIO]) -> TextFile:
    suffixes = ["", "", *(suffix.lower() for suffix in PurePosixPath(place).suffixes)]
    codec = _CODECS.get(suffixes[-1], "")
    unit = _UNITS.get(suffix := suffixes[-2] if codec else suffixes[-1], WHOLE_FILE)
    file = TextFile(source=source, place=place, bytes=size_bytes, unit=unit, codec=codec, opener=opener)
    if suffix in _REFUSED_SUFFIXES:
        raise file.invalid(f"{suffix} files are not read", "plain text, .jsonl or .parquet, also as .gz or .zst")
    return file


def _find_remote(source: str) -> tuple[str, list[TextFile]]:
    import fsspec  # slow to import

    # s3fs keeps listings for ever by default, which would hide new files.
    try:
        fs, path = fsspec.core.url_to_fs(source, use_listings_cache=False, skip_instance_cache=True)
        is_file = not glob.has_magic(path) or fs.exists(path)
        found = {path: fs.info(path)} if is_file else fs.glob(path, detail=True)
    except Exception as problem:  # every file system has errors of its own
        rule = "every source can be read. Correct the URL"
        raise _invalid(source, why_unreadable(problem, source), rule) from problem
    if is_file and found[path]["type"] == "directory":
        raise _is_directory(source, path)
    return path, [
        _text_file(source, fs.unstrip_protocol(item), int(info["size"] or 0), partial(fs.open, item, "rb"))
        for item, info in sorted(found.items())
        if info["type"] == "file"
    ]


def _is_directory(source: str, path: str) -> InvalidCorpus:
    rule = f"files or globs. Name what you mean in it, such as {source.rstrip('/')}/**/*.txt"
    return _invalid(source, f"{path} is a directory", rule)


def _invalid(source: str, problem: str, rule: str) -> InvalidCorpus:
    return InvalidCorpus(f"data.sources = {source!r}: {problem}; rule: {rule}")


def decompress(stream: BinaryIO, codec: str, stored_bytes: int) -> BinaryIO:
    """Return the text; reading damaged or far too long bytes raises OSError or ArrowException."""
    unpacked: Any = stream
    if codec:  # without PythonFile pyarrow would close the caller's stream
        unpacked = _Bounded(pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), codec), stored_bytes)
    return cast(BinaryIO, io.BufferedReader(unpacked, CHUNK_BYTES))


class _Bounded(io.RawIOBase):
    def __init__(self, unpacked: Any, stored_bytes: int) -> None:
        self._unpacked, self._stored_bytes, self._left = unpacked, stored_bytes, most_bytes(stored_bytes)

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        size = int(self._unpacked.readinto(target))
        self._left -= size
        if self._left < 0:
            most = f"{self._stored_bytes:,} bytes become more than {most_bytes(self._stored_bytes):,}"
            raise OSError(f"its {most}; decompress it where you trust it")
        return size


def read_pieces(
    stream: BinaryIO, file: TextFile, data: DataConfig, *, border: int | None, text_bytes: int
) -> Iterator[Piece]:
    """Yield the documents and rejected documents of an open file in order."""
    reader = _Reader(name=file.name, data=data)
    if file.unit == ROW and not file.codec and "://" not in file.place:
        yield from reader.table(stream)
        return
    text = decompress(stream, file.codec, file.bytes)
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
            yield reader.document(offset, content)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    name: str
    data: DataConfig

    def text_with_border(self, text: BinaryIO, border: int, text_bytes: int) -> Iterator[Piece]:
        for offset, content in pieces_of(text, self.data.max_document_bytes, border):
            ends = offset + len(content) >= text_bytes or offset < border <= offset + len(content)
            yield self.document(offset, content, placed="train" if offset < border else "val", ends=ends)

    def document(self, offset: int, content: bytes, placed: SplitName | None = None, ends: bool = True) -> Piece:
        if placed is None and not content.strip():
            return self._rejected(offset, RejectionKind.EMPTY, "no text but white space")
        try:
            return make_document(self.name, offset, content, placed=placed, ends=ends)
        except UnicodeDecodeError as problem:
            return self._not_utf8(offset, problem)

    def json_lines(self, text: BinaryIO) -> Iterator[Piece]:
        # A struct of one field: msgspec skips the others without making objects.
        field: Any = msgspec.defstruct("Line", [("text", Any, msgspec.UNSET)], rename={"text": self.data.text_field})
        for offset, line in lines_of(text, LONGEST_LINE_BYTES):
            if not line.strip():
                continue
            value: object = (line := line.rstrip(b"\r\n"))
            try:
                if len(line) <= LONGEST_LINE_BYTES:
                    line.decode("utf-8")  # the parser does not check skipped fields
                    value = msgspec.json.decode(line, type=field).text
                    value = value.encode("utf-8") if isinstance(value, str) else value
            except UnicodeDecodeError as problem:
                yield self._not_utf8(offset, problem)
            except UnicodeEncodeError as problem:  # a lone surrogate is legal in an escape, but not in UTF-8
                yield self._rejected(offset, RejectionKind.NOT_UTF8, str(problem))
            except (msgspec.DecodeError, RecursionError) as problem:
                yield self._rejected(offset, RejectionKind.NOT_JSON, str(problem))
            else:
                yield from self._value(offset, value)

    def table(self, file: BinaryIO) -> Iterator[Piece]:
        batches = read_parquet(file, [self.data.text_field])
        schema = next(batches).schema
        values: Iterable[object] = repeat(schema.types[0] if schema.names else None, int(schema.metadata[ROWS]))
        if schema.types == [pa.large_binary()]:
            values = chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
        for row, value in enumerate(values):
            yield from self._value(row, value)

    def _value(self, offset: int, value: object) -> Iterator[Piece]:
        """Yield the documents of the field's value, the bytes of a text, or why it has none."""
        field, kind = self.data.text_field, str(value) if isinstance(value, pa.DataType) else type(value).__name__
        if value is None or value is msgspec.UNSET:
            yield self._rejected(offset, RejectionKind.MISSING_FIELD, f"no field {field!r}, or null in it")
        elif not isinstance(value, bytes):
            yield self._rejected(offset, RejectionKind.NOT_A_STRING, f"field {field!r} is {kind}, not a string")
        elif len(value) > LONGEST_LINE_BYTES:
            yield self._rejected(offset, RejectionKind.TOO_LONG, f"longer than {LONGEST_LINE_BYTES} bytes")
        elif len(value) <= self.data.max_document_bytes:
            yield self.document(offset, value)
        else:
            for _, piece in pieces_of(io.BytesIO(value), self.data.max_document_bytes):
                yield self.document(offset, piece)

    def _not_utf8(self, offset: int, problem: UnicodeDecodeError) -> RejectedRow:
        byte, start = problem.object[problem.start], problem.start
        detail = f"undecodable byte 0x{byte:02x}, {start} bytes into it ({problem.reason})"
        return self._rejected(offset, RejectionKind.NOT_UTF8, detail)

    def _rejected(self, offset: int, kind: RejectionKind, detail: str) -> RejectedRow:
        return RejectedRow(source=self.name, offset_bytes=offset, kind=kind, detail=detail[:_DETAIL_CHARACTERS])


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
