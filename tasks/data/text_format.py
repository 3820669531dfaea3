"""The unit of documents and the compression of a text file, by its suffixes, and the decompression of its bytes.

Sources: RFC 1952 (gzip), RFC 8878 (Zstandard), jsonlines.org, Apache Parquet.
"""

import gzip
import io
import zlib
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import pyarrow as pa

from storage.snapshots.parquet_process import most_bytes

CHUNK_BYTES = 1 << 20
WHOLE_FILE = "whole file"
HELD_OUT_END = "text whose end is held out"
LINE = "line"
ROW = "row"
DECOMPRESSION_ERRORS = (EOFError, zlib.error, pa.ArrowException)
# Refused, because they would be read as prose.
_UNSUPPORTED_SUFFIXES = frozenset(
    {".bz2", ".xz", ".zip", ".tar", ".tgz", ".tzst", ".arrow", ".feather", ".orc", ".avro"}
)


class Compression(StrEnum):
    """How a whole file is compressed."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"


_UNITS = {".jsonl": LINE, ".ndjson": LINE, ".parquet": ROW}
_COMPRESSIONS = {".gz": Compression.GZIP, ".zst": Compression.ZSTD}


def unit_and_compression(name: str) -> tuple[str, Compression]:
    """Return what a document is in a file, before long ones are cut, and how the file is compressed."""
    packed, suffix = _split_suffixes(name)
    return _UNITS.get(suffix, WHOLE_FILE), _COMPRESSIONS.get(packed, Compression.NONE)


def unsupported_suffix(name: str) -> str | None:
    """Return the suffix of a format that cannot be read, if the name has one."""
    return next((suffix for suffix in _split_suffixes(name) if suffix in _UNSUPPORTED_SUFFIXES), None)


def decompress(stream: BinaryIO, compression: Compression, stored_bytes: int) -> BinaryIO:
    """Return the text; reading damaged or far too long bytes raises OSError or one of DECOMPRESSION_ERRORS."""
    unpacked: Any = stream
    if compression is Compression.GZIP:
        unpacked = _Bounded(gzip.GzipFile(fileobj=stream, mode="rb"), stored_bytes)
    elif compression is Compression.ZSTD:
        # Without PythonFile pyarrow would close the caller's stream.
        unpacked = _Bounded(pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd"), stored_bytes)
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


def _split_suffixes(name: str) -> tuple[str, str]:
    """Return the compression suffix and the suffix before it, in lower case and empty if absent."""
    suffixes = ["", "", *(suffix.lower() for suffix in PurePosixPath(name).suffixes)]
    return (suffixes[-1], suffixes[-2]) if suffixes[-1] in _COMPRESSIONS else ("", suffixes[-1])
