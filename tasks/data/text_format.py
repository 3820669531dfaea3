"""What a file's name says of its content: prose, lines of JSON or a Parquet table, and how it is compressed.

Owns the suffixes and the unpacking of a byte stream. Refuses to know where the bytes come from and what a document
is. Sources: RFC 1952 (gzip), RFC 8878 (Zstandard), jsonlines.org, Apache Parquet.
"""

import gzip
import io
import zlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import pyarrow as pa

CHUNK_BYTES = 1 << 20
# Each of these would be read as if it were prose; better to say what is missing.
UNREAD_SUFFIXES = frozenset({".bz2", ".xz", ".zip", ".tar", ".tgz", ".tzst", ".arrow", ".feather", ".orc", ".avro"})
UNPACKING_FAULTS = (EOFError, zlib.error, pa.ArrowException)


class Shape(StrEnum):
    """How documents lie in a file."""

    TEXT = "text"
    JSON_LINES = "json-lines"
    PARQUET = "parquet"


class Compression(StrEnum):
    """How a file is packed as a whole."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"


_SHAPES = {".jsonl": Shape.JSON_LINES, ".ndjson": Shape.JSON_LINES, ".parquet": Shape.PARQUET}
_COMPRESSIONS = {".gz": Compression.GZIP, ".zst": Compression.ZSTD}


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFormat:
    """A file's shape and compression."""

    shape: Shape
    compression: Compression


def format_of(name: str) -> TextFormat:
    """Return what the suffixes of a file's name say; every suffix that says nothing is prose."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    compression = _COMPRESSIONS.get(suffixes[-1], Compression.NONE) if suffixes else Compression.NONE
    inner = suffixes[:-1] if compression is not Compression.NONE else suffixes
    return TextFormat(shape=_SHAPES.get(inner[-1], Shape.TEXT) if inner else Shape.TEXT, compression=compression)


def unread_suffix(name: str) -> str | None:
    """Return the suffix that no reader here understands, if the name has one where it counts."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    inner = suffixes[:-1] if suffixes and suffixes[-1] in _COMPRESSIONS else suffixes
    return next((suffix for suffix in (*suffixes[-1:], *inner[-1:]) if suffix in UNREAD_SUFFIXES), None)


def unpacked(stream: BinaryIO, compression: Compression) -> BinaryIO:
    """Return a buffered stream of the unpacked bytes; nothing is held but a buffer, several frames are one text.

    Reading it raises one of ``UNPACKING_FAULTS`` or OSError where the bytes are not what the name says.
    """
    if compression is Compression.GZIP:
        return cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=stream, mode="rb"), CHUNK_BYTES))
    if compression is Compression.ZSTD:
        # pyarrow closes what it wraps when it is collected; the caller's stream is the caller's to close.
        packed = pa.PythonFile(stream, mode="r")
        return cast(BinaryIO, io.BufferedReader(cast(Any, pa.CompressedInputStream(packed, "zstd")), CHUNK_BYTES))
    return cast(BinaryIO, io.BufferedReader(cast(Any, stream), CHUNK_BYTES))
