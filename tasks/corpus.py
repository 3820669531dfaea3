"""From ``data.sources`` to documents: finds the text files, checks all of them, and reads them document by document.

Owns what a source may be and what a document is: a source that names one file gives its blank-line-separated blocks,
every file of a glob is one document. The rule looks at one source at a time, so that adding a source never re-cuts
another. Refuses to know tokens, splits and snapshots. Text is UTF-8 (RFC 3629).
"""

import codecs
import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tasks.document import Document, InvalidCorpus, Source, document_of
from tasks.python_corpus import open_python_source

CHUNK_BYTES = 1 << 20
# Each of these would be read as if it were prose; better to say what is missing.
UNREAD_SUFFIXES = (".jsonl", ".parquet", ".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".arrow")
BLOCKS = "blank-line-separated blocks"
WHOLE_FILE = "whole file"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """A file that a source names: ``place`` is its full path or URL, ``unit`` what a document is in it."""

    source: str
    place: str
    unit: str
    opener: Callable[[], BinaryIO]


def open_corpus(sources: Sequence[str], base_dir: Path) -> tuple[Source, ...]:
    """Find and check every source before any work; relative paths start at ``base_dir``.

    The result is ordered by name, whatever the order of the configuration or of a directory listing.
    Raises InvalidCorpus for a source that is missing, empty, not UTF-8 or not readable yet.
    """
    if not sources:
        raise InvalidCorpus("data.sources = []: rule: at least one source; name a text file or a glob")
    python = [open_python_source(source) for source in dict.fromkeys(sources) if source.startswith("python:")]
    named = [source for source in dict.fromkeys(sources) if not source.startswith("python:")]
    files = _one_per_place([file for source in named for file in _find_files(source, base_dir)])
    root = _common_folder([file.place for file in files])
    checked = [_check_file(file, _portable_name(file.place, root)) for file in files]
    return tuple(sorted([*python, *checked], key=lambda source: source.name))


def _find_files(source: str, base_dir: Path) -> list[TextFile]:
    found = _find_remote(source) if "://" in source else _find_local(source, base_dir)
    for file in found:
        suffix = os.path.splitext(file.place)[1].lower()
        if suffix in UNREAD_SUFFIXES:
            raise _refusal(file, f"{suffix} files are not read yet", "plain UTF-8 text files; convert it to .txt")
    return found


def _find_local(source: str, base_dir: Path) -> list[TextFile]:
    path = os.path.abspath(base_dir / Path(source).expanduser())
    if os.path.isdir(path):
        raise _directory(source, path)
    if os.path.isfile(path):
        return [_local_file(source, path, BLOCKS)]
    if not glob.has_magic(source):
        raise InvalidCorpus(
            f"data.sources = {source!r}: no such file, looked at {path}; rule: every source exists. Correct the path "
            f"(relative paths start at {base_dir})"
        )
    matches = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not matches:
        raise _nothing_matched(source, path)
    return [_local_file(source, match, WHOLE_FILE) for match in matches]


def _local_file(source: str, path: str, unit: str) -> TextFile:
    return TextFile(source=source, place=path, unit=unit, opener=lambda: open(path, "rb"))


def _find_remote(source: str) -> list[TextFile]:
    import fsspec  # only who names a URL pays for it

    # A listing kept from earlier would hide files written since (s3fs keeps them for ever by default).
    try:
        fs, path = fsspec.core.url_to_fs(source, use_listings_cache=False, skip_instance_cache=True)
        if glob.has_magic(path) and not fs.exists(path):
            paths, unit = sorted(match for match in fs.glob(path) if fs.isfile(match)), WHOLE_FILE
        else:
            paths, unit = [path], BLOCKS
        missing, folder = not all(map(fs.exists, paths)), any(map(fs.isdir, paths))
    except (ImportError, ValueError, OSError) as problem:
        raise InvalidCorpus(
            f"data.sources = {source!r}: cannot be opened ({problem}); rule: a readable URL"
        ) from problem
    if folder:
        raise _directory(source, path)
    if missing:
        raise InvalidCorpus(f"data.sources = {source!r}: no such object; rule: every source exists. Correct the URL")
    if not paths:
        raise _nothing_matched(source, path)
    return [
        TextFile(source=source, place=fs.unstrip_protocol(item), unit=unit, opener=partial(fs.open, item, "rb"))
        for item in paths
    ]


def _directory(source: str, path: str) -> InvalidCorpus:
    return InvalidCorpus(
        f"data.sources = {source!r}: {path} is a directory; rule: files or globs. Name what you mean in it, such as "
        f"{source.rstrip('/')}/**/*.txt"
    )


def _nothing_matched(source: str, pattern: str) -> InvalidCorpus:
    return InvalidCorpus(
        f"data.sources = {source!r}: the glob matches no file, looked for {pattern}; rule: a glob matches at least "
        "one file. Correct the pattern"
    )


def _refusal(file: TextFile, problem: str, rule: str) -> InvalidCorpus:
    return InvalidCorpus(f"data.sources = {file.source!r}: file {file.place}: {problem}; rule: {rule}")


def _one_per_place(files: list[TextFile]) -> list[TextFile]:
    """Drop files named twice; refuse one that two sources would cut into different documents."""
    kept: dict[str, TextFile] = {}
    for file in files:
        place = file.place if "://" in file.place else os.path.realpath(file.place)
        first = kept.setdefault(place, file)
        if first.unit != file.unit:
            rule = f"one source a file, as it is cut into {first.unit} by the one and read as {file.unit} by the other"
            raise _refusal(file, f"also named by data.sources = {first.source!r}", rule)
    return list(kept.values())


def _common_folder(places: list[str]) -> str:
    local = [os.path.dirname(place) for place in places if "://" not in place]
    return os.path.commonpath(local) if local else ""


def _portable_name(place: str, root: str) -> str:
    # The snapshot's identity must not depend on where a checkout happens to lie.
    return place if "://" in place else Path(os.path.relpath(place, root)).as_posix()


def _check_file(file: TextFile, name: str) -> Source:
    """Read the file once: hash it, and refuse it if it has no text or is not UTF-8."""
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")()
    size_bytes, has_text, chunk = 0, False, b" "
    with _opened(file) as stream:
        while chunk:
            chunk = stream.read(CHUNK_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as problem:
                offset = size_bytes - pending + problem.start
                what = f"undecodable byte 0x{problem.object[problem.start]:02x} at offset {offset} ({problem.reason})"
                raise _refusal(file, what, "UTF-8 text; convert the file, or leave it out") from problem
            digest.update(chunk)
            size_bytes += len(chunk)
            has_text = has_text or bool(chunk.strip())
    if not has_text:
        what = "the file is empty" if size_bytes == 0 else "the file holds only white space"
        raise _refusal(file, what, "every source has text; fill the file, or leave it out")
    found = Source(name=name, bytes=size_bytes, sha256=digest.hexdigest(), unit=file.unit, documents=_no_documents)
    return replace(found, documents=lambda: _documents(file, found))


def _no_documents() -> Iterator[Document]:
    yield from ()


@contextmanager
def _opened(file: TextFile) -> Iterator[BinaryIO]:
    try:
        with file.opener() as stream:
            yield stream
    except OSError as problem:
        raise _refusal(file, f"cannot be read ({problem})", "every source is readable") from problem


def _documents(file: TextFile, source: Source) -> Iterator[Document]:
    """Yield the documents, and refuse at the end a file that is no longer what was checked."""
    digest = hashlib.sha256()
    with _opened(file) as stream:
        for offset, content in _pieces(stream, file.unit, digest.update):
            try:
                yield document_of(source.name, offset, content)
            except UnicodeDecodeError as problem:
                raise _changed(file) from problem
    if digest.hexdigest() != source.sha256:
        raise _changed(file)


def _changed(file: TextFile) -> InvalidCorpus:
    return _refusal(file, "changed while it was read", "sources stand still while a snapshot is built; run it again")


def _pieces(stream: BinaryIO, unit: str, seen: Callable[[bytes], None]) -> Iterator[tuple[int, bytes]]:
    if unit == BLOCKS:
        yield from blocks_of(_noted(stream, seen))
        return
    content = stream.read()
    seen(content)
    if content:
        yield 0, content


def _noted(lines: Iterator[bytes] | BinaryIO, seen: Callable[[bytes], None]) -> Iterator[bytes]:
    for line in lines:
        seen(line)
        yield line


def blocks_of(lines: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in bytes, content) of each run of lines that are not blank, without its last line end.

    A line of nothing but white space is blank. Line ends inside a block stay as they are.
    """
    offset, start = 0, 0
    block: list[bytes] = []
    for line in lines:
        if line.strip():
            start = start if block else offset
            block.append(line)
        elif block:
            yield start, b"".join(block).rstrip(b"\r\n")
            block = []
        offset += len(line)
    if block:
        yield start, b"".join(block).rstrip(b"\r\n")
