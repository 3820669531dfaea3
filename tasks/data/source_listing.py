"""Finds the files that `data.sources` names by paths, globs and URLs, sorted, each once, and decompresses their bytes.

Sources: RFC 1952 (gzip), RFC 8878 (Zstandard), jsonlines.org, Apache Parquet.
"""

import glob
import gzip
import io
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import pyarrow as pa

from cairn.storage.snapshots.parquet_process import most_bytes
from cairn.storage.stores.redaction import find_credentials
from cairn.tasks.configuration.addresses import READABLE, why_unreadable, wrong_scheme
from cairn.tasks.data.document import InvalidCorpus

CHUNK_BYTES = 1 << 20
WHOLE_FILE = "whole file"
HELD_OUT_END = "text whose end is held out"
LINE = "line"
ROW = "row"
DECOMPRESSION_ERRORS = (EOFError, zlib.error, pa.ArrowException)
# They would be read as prose.
_REFUSED_SUFFIXES = frozenset({".bz2", ".xz", ".zip", ".tar", ".tgz", ".tzst", ".arrow", ".feather", ".orc", ".avro"})
_UNITS = {".jsonl": LINE, ".ndjson": LINE, ".parquet": ROW}


class Compression(StrEnum):
    """How a whole file is compressed, by its suffix."""

    NONE = ""
    GZIP = ".gz"
    ZSTD = ".zst"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """A file of a source: `place` is its full path or URL, `bytes` its size, `unit` what a document is in it.

    `name` is the same on every machine: the path from the folder that all files have in common, or the URL.
    """

    source: str
    place: str
    bytes: int
    unit: str
    compression: Compression
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
        found += _find_remote(source) if "://" in source else _find_local(source, base_dir)
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


def _find_local(source: str, base_dir: Path) -> list[TextFile]:
    path = os.path.abspath(base_dir / Path(source).expanduser())
    if os.path.isdir(path):
        raise _is_directory(source, path)
    is_file = os.path.isfile(path)
    if not is_file and not glob.has_magic(source):
        rule = f"every source exists. Correct the path (relative paths start at {base_dir})"
        raise _invalid(source, f"no such file, looked at {path}", rule)
    matches = [path] if is_file else sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not matches:
        raise _no_match(source, path)
    return [_text_file(source, match, os.path.getsize(match), partial(_open_local, match)) for match in matches]


def _open_local(path: str) -> BinaryIO:
    return open(path, "rb")


def _text_file(source: str, place: str, size_bytes: int, opener: Callable[[], BinaryIO]) -> TextFile:
    suffixes = ["", "", *(suffix.lower() for suffix in PurePosixPath(place).suffixes)]
    packed, suffix = (suffixes[-1], suffixes[-2]) if suffixes[-1] in set(Compression) else ("", suffixes[-1])
    compression, unit = Compression(packed), _UNITS.get(suffix, WHOLE_FILE)
    file = TextFile(source=source, place=place, bytes=size_bytes, unit=unit, compression=compression, opener=opener)
    if suffix in _REFUSED_SUFFIXES:
        raise file.invalid(f"{suffix} files are not read", "plain text, .jsonl or .parquet, also as .gz or .zst")
    return file


def _find_remote(source: str) -> list[TextFile]:
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
    files = [
        _text_file(source, fs.unstrip_protocol(item), int(info["size"] or 0), partial(fs.open, item, "rb"))
        for item, info in sorted(found.items())
        if info["type"] == "file"
    ]
    if not files:
        raise _no_match(source, path)
    return files


def _is_directory(source: str, path: str) -> InvalidCorpus:
    rule = f"files or globs. Name what you mean in it, such as {source.rstrip('/')}/**/*.txt"
    return _invalid(source, f"{path} is a directory", rule)


def _no_match(source: str, pattern: str) -> InvalidCorpus:
    rule = "a glob matches at least one file. Correct the pattern"
    return _invalid(source, f"the glob matches no file, looked for {pattern}", rule)


def _invalid(source: str, problem: str, rule: str) -> InvalidCorpus:
    return InvalidCorpus(f"data.sources = {source!r}: {problem}; rule: {rule}")


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
