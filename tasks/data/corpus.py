"""Opens `data.sources` as documents; what is read later has the hash that was checked first, or raises an error.

A file of text, a line of JSON and a row of Parquet is a document, or several where it is long. Each belongs to train or
val by its own hash; but of a few files of text the end of each is held out.
"""

import codecs
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import RawIOBase
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, cast

from storage.errors import IntegrityError
from storage.stores.document import project
from tasks.data.document import InvalidCorpus, Piece, Source
from tasks.data.document_reader import ReadingRules, read_pieces
from tasks.data.python_corpus import open_python_source
from tasks.data.source_listing import (
    CHUNK_BYTES,
    DECOMPRESSION_ERRORS,
    HELD_OUT_END,
    ROW,
    WHOLE_FILE,
    TextFile,
    decompress,
    find_files,
)

# A preview checks a corpus up to this size; of a larger one it only finds the files.
PREVIEW_BYTES = 64 * 1024 * 1024
FEW_FILES = 100
"""Up to so many files of text the end of each is held out: of fewer documents a hash may take far too many or few."""

_CHECK_THREADS = 4
_DEFAULT_RULES = ReadingRules()
_ORDER = attrgetter("group", "name")


def open_corpus(
    sources: Sequence[str],
    base_dir: Path,
    rules: ReadingRules = _DEFAULT_RULES,
    on_bytes: Callable[[int, int], None] | None = None,
    *,
    groups: Sequence[str] = (),
) -> tuple[Source, ...]:
    """Find and check every source, sorted by group and name; relative paths start at `base_dir`.

    `groups` names a group for each of `sources`. Calls on_bytes(checked, total) after each file. Raises InvalidCorpus
    for a source that is missing, empty, not UTF-8 or of an unsupported format, and for a file in two groups.
    """
    python, files = _find(sources, base_dir, rules, groups)
    checked = list(python)
    total, done = sum(file.bytes for file in files), 0
    with ThreadPoolExecutor(_CHECK_THREADS, thread_name_prefix="check") as pool:
        try:
            for source in pool.map(partial(_check, rules), files):
                checked.append(source)
                done += source.bytes
                if on_bytes:
                    on_bytes(done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tuple(sorted(checked, key=_ORDER))


def preview_corpus(
    sources: Sequence[str], base_dir: Path, rules: ReadingRules = _DEFAULT_RULES, *, groups: Sequence[str] = ()
) -> tuple[Source, ...]:
    """Return the sources as `open_corpus` does, but those of a large corpus unchecked, with an empty `sha256`."""
    python, files = _find(sources, base_dir, rules, groups)
    if sum(file.bytes for file in files) <= PREVIEW_BYTES:
        return open_corpus(sources, base_dir, rules, groups=groups)
    unchecked = (_source(rules, file, file.bytes, "", file.bytes) for file in files)
    return tuple(sorted([*python, *unchecked], key=_ORDER))


def _find(
    sources: Sequence[str], base_dir: Path, rules: ReadingRules, groups: Sequence[str]
) -> tuple[list[Source], list[TextFile]]:
    if not sources:
        raise InvalidCorpus("data.sources = []: rule: at least one source; name a text file or a glob")
    group_of = dict(zip(sources, groups, strict=True)) if groups else dict.fromkeys(sources, "")
    python = {source: group for source, group in group_of.items() if source.startswith("python:")}
    built_in = [replace(open_python_source(source), group=group) for source, group in python.items()]
    files = find_files({source: group for source, group in group_of.items() if source not in python}, base_dir)
    texts = sum(file.unit == WHOLE_FILE for file in files)
    if rules.split != "documents" and not (rules.split == "auto" and texts > FEW_FILES):
        files = [replace(file, unit=HELD_OUT_END) if file.unit == WHOLE_FILE else file for file in files]
    return built_in, files


def _source(rules: ReadingRules, file: TextFile, size_bytes: int, digest: str, text_bytes: int) -> Source:
    """Return the source; a text of unknown size is taken for one that is not compressed."""
    border = int(text_bytes * (1 - rules.val_fraction)) if file.unit == HELD_OUT_END else None
    pieces = partial(_pieces, rules, file, digest, border, text_bytes)
    return project(file, Source, bytes=size_bytes, sha256=digest, pieces=pieces, border=border, text_bytes=text_bytes)


def _check(rules: ReadingRules, file: TextFile) -> Source:
    """Hash the file; a text whose end is held out must be UTF-8 (RFC 3629) and not empty."""
    text_bytes = 0
    with _open_hashed(file) as stream:
        if file.unit == HELD_OUT_END:
            text_bytes = _require_text(file, decompress(cast(BinaryIO, stream), file.compression, file.bytes))
        digest = stream.sha256_to_end()
    if stream.bytes == 0:
        raise file.invalid("the file is empty", "every source has text; fill the file, or leave it out")
    return _source(rules, file, stream.bytes, digest, text_bytes)


def _require_text(file: TextFile, text: BinaryIO) -> int:
    """Return the size of the text in bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size_bytes, has_text, chunk = 0, False, b" "
    while chunk:
        chunk = text.read(CHUNK_BYTES)
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as problem:
            offset = size_bytes - pending + problem.start
            what = f"undecodable byte 0x{problem.object[problem.start]:02x} at offset {offset} ({problem.reason})"
            raise file.invalid(what, "UTF-8 text; convert the file, or leave it out") from problem
        size_bytes += len(chunk)
        has_text = has_text or bool(chunk.strip())
    if not has_text:
        what = "the file is empty" if size_bytes == 0 else "the file holds only white space"
        raise file.invalid(what, "every source has text; fill the file, or leave it out")
    return size_bytes


def _pieces(rules: ReadingRules, file: TextFile, digest: str, border: int | None, text_bytes: int) -> Iterator[Piece]:
    """Yield the pieces; raises InvalidCorpus at the end if the file no longer has `digest`."""
    read = partial(read_pieces, file=file, rules=rules, border=border, text_bytes=text_bytes)
    try:
        if file.unit == ROW:  # a table is not read from front to back, so it is hashed afterwards
            with _convert_errors(file), file.opener() as table:
                yield from read(table)
            found = _sha256_of(file) if digest else ""
        else:
            with _open_hashed(file) as stream:
                yield from read(cast(BinaryIO, stream))
                found = stream.sha256_to_end() if digest else ""
    except InvalidCorpus as problem:
        if digest and _sha256_of(file) != digest:
            raise _changed(file) from problem
        raise
    if found != digest:
        raise _changed(file)


def _sha256_of(file: TextFile) -> str:
    with _open_hashed(file) as stream:
        return stream.sha256_to_end()


def _changed(file: TextFile) -> InvalidCorpus:
    return file.invalid("changed while it was read", "sources stand still while a snapshot is built; run it again")


@contextmanager
def _convert_errors(file: TextFile) -> Iterator[None]:
    try:
        yield
    except (OSError, IntegrityError, *DECOMPRESSION_ERRORS) as problem:
        raise file.invalid(f"cannot be read ({problem})", "every source is readable") from problem


@contextmanager
def _open_hashed(file: TextFile) -> Iterator["_HashedStream"]:
    with _convert_errors(file), file.opener() as stream:
        yield _HashedStream(stream)


class _HashedStream(RawIOBase):
    """Reads forward from a stream that its opener closes; `bytes` and the digest are of everything read so far."""

    mode = "rb"  # pyarrow asks for it

    def __init__(self, inner: BinaryIO) -> None:
        self._inner, self._digest, self.bytes = inner, hashlib.sha256(), 0

    def read(self, size: int = -1) -> bytes:
        data = self._inner.read(size)
        self._digest.update(data)
        self.bytes += len(data)
        return data

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def sha256_to_end(self) -> str:
        while self.read(CHUNK_BYTES):
            pass
        return self._digest.hexdigest()

    def readable(self) -> bool:
        return True
