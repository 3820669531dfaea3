"""From ``data.sources`` to documents: checks every file that is named, and reads it document by document.

Owns the check and its promise: what is read later is what was hashed before, or an error. Refuses to know tokens,
splits and snapshots. A source that names one text file gives its blank-line-separated blocks and must be UTF-8
(RFC 3629) throughout; every text file of a glob is one document; each line of JSON and each row of Parquet is one,
however it is named. The rule looks at one source at a time, so that adding a source never re-cuts another.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from tasks.data.document import InvalidCorpus, Piece, Source
from tasks.data.document_reader import BLOCKS, ROW, ReadingRules, read_pieces
from tasks.data.hashed_stream import HashedStream
from tasks.data.python_corpus import open_python_source
from tasks.data.source_listing import TextFile, find_files, portable_names
from tasks.data.text_format import CHUNK_BYTES, UNPACKING_FAULTS, unpacked

# What is read through before anything is started; more is only found, and read as far as is needed.
PREVIEW_BYTES = 64 * 1024 * 1024
# Hashing and waiting for a store both leave the interpreter to others.
CHECKING_THREADS = 4
DEFAULT_RULES = ReadingRules()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Named:
    file: TextFile
    name: str
    rules: ReadingRules
    group: str


def open_corpus(
    sources: Sequence[str],
    base_dir: Path,
    rules: ReadingRules = DEFAULT_RULES,
    on_bytes: Callable[[int, int], None] | None = None,
    *,
    groups: Sequence[str] = (),
) -> tuple[Source, ...]:
    """Find and check every source before any work; relative paths start at ``base_dir``.

    The result is ordered by name, whatever the order of the configuration or of a directory listing; with ``groups``,
    a name for each of ``sources``, by group first, so that what one entry names lies together. ``on_bytes`` is told
    how many bytes of how many are checked. Raises InvalidCorpus for a source that is missing, empty, not UTF-8 or of
    a kind that is not read, and for a file in two groups.
    """
    python, files = _find(sources, base_dir, rules, groups)
    checked = list(python)
    total, done = sum(item.file.bytes for item in files), 0
    with ThreadPoolExecutor(CHECKING_THREADS, thread_name_prefix="check") as pool:
        try:
            for source in pool.map(_checked, files):
                checked.append(source)
                done += source.bytes
                if on_bytes:
                    on_bytes(done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return _in_order(checked)


def preview_corpus(
    sources: Sequence[str], base_dir: Path, rules: ReadingRules = DEFAULT_RULES, *, groups: Sequence[str] = ()
) -> tuple[Source, ...]:
    """Return the sources for a quick look: checked like `open_corpus` where that is quick, else found and no more.

    Sources that were only found have an empty ``sha256``.
    """
    python, files = _find(sources, base_dir, rules, groups)
    if sum(item.file.bytes for item in files) <= PREVIEW_BYTES:
        return open_corpus(sources, base_dir, rules, groups=groups)
    return _in_order([*python, *(_source(item, item.file.bytes, "") for item in files)])


def _in_order(sources: Iterable[Source]) -> tuple[Source, ...]:
    return tuple(sorted(sources, key=lambda source: (source.group, source.name)))


def _find(
    sources: Sequence[str], base_dir: Path, rules: ReadingRules, groups: Sequence[str]
) -> tuple[list[Source], list[_Named]]:
    if not sources:
        raise InvalidCorpus("data.sources = []: rule: at least one source; name a text file or a glob")
    group_of = dict(zip(sources, groups, strict=True)) if groups else dict.fromkeys(sources, "")
    python = [
        replace(open_python_source(source), group=group)
        for source, group in group_of.items()
        if source.startswith("python:")
    ]
    paths = [source for source in group_of if not source.startswith("python:")]
    files = find_files(paths, base_dir, apart=bool(groups))
    named = zip(files, portable_names(files), strict=True)
    return python, [_Named(file=file, name=name, rules=rules, group=group_of[file.source]) for file, name in named]


def _source(named: _Named, size_bytes: int, digest: str) -> Source:
    return Source(
        name=named.name,
        bytes=size_bytes,
        sha256=digest,
        unit=named.file.unit,
        pieces=partial(_pieces, named, digest),
        group=named.group,
    )


def _checked(named: _Named) -> Source:
    """Read the file once: hash it, and refuse a text that is named alone if it is empty or not UTF-8."""
    with _opened(named.file) as stream:
        if named.file.unit == BLOCKS:
            _require_text(named.file, unpacked(cast(BinaryIO, stream), named.file.text_format.compression))
        digest = stream.sha256_to_end()
    if stream.bytes == 0:
        raise named.file.refusal("the file is empty", "every source has text; fill the file, or leave it out")
    return _source(named, stream.bytes, digest)


def _require_text(file: TextFile, text: BinaryIO) -> None:
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
            raise file.refusal(what, "UTF-8 text; convert the file, or leave it out") from problem
        size_bytes += len(chunk)
        has_text = has_text or bool(chunk.strip())
    if not has_text:
        what = "the file is empty" if size_bytes == 0 else "the file holds only white space"
        raise file.refusal(what, "every source has text; fill the file, or leave it out")


@contextmanager
def _opened(file: TextFile) -> Iterator[HashedStream]:
    try:
        with file.opener() as stream:
            yield HashedStream(stream)
    except (OSError, *UNPACKING_FAULTS) as problem:
        raise file.refusal(f"cannot be read ({problem})", "every source is readable") from problem


def _pieces(named: _Named, digest: str) -> Iterator[Piece]:
    """Yield the pieces, and refuse at the end a file that is no longer what was checked (``digest``)."""
    file = named.file
    try:
        if file.unit == ROW:
            yield from _table_pieces(named)
            found = _sha256_of(file) if digest else ""  # a table is not read from front to back
        else:
            with _opened(file) as stream:
                source = cast(BinaryIO, stream)
                yield from read_pieces(source, named.name, file.text_format, file.unit, named.rules)
                found = stream.sha256_to_end() if digest else ""
    except InvalidCorpus as problem:
        if digest and _sha256_of(file) != digest:
            raise _changed(file) from problem
        raise
    if found != digest:
        raise _changed(file)


def _table_pieces(named: _Named) -> Iterator[Piece]:
    file = named.file
    try:
        with file.opener() as stream:
            yield from read_pieces(stream, named.name, file.text_format, file.unit, named.rules)
    except (OSError, *UNPACKING_FAULTS) as problem:
        raise file.refusal(f"cannot be read ({problem})", "every source is readable") from problem


def _sha256_of(file: TextFile) -> str:
    with _opened(file) as stream:
        return stream.sha256_to_end()


def _changed(file: TextFile) -> InvalidCorpus:
    return file.refusal("changed while it was read", "sources stand still while a snapshot is built; run it again")
