"""Opens `data.sources` as documents; later reads have the hash that was checked first, or raise an error.

A file of text, a line of JSON and a row of Parquet is a document, or several where it is long. Each belongs to train or
val by its own hash; but of a few files of text the end of each is held out. The sources `python:topics` and
`python:docstrings` (by `ast`) are text of every CPython, for a first run offline.
"""

import ast
import codecs
import gc
import hashlib
import sysconfig
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from cairn.model.configuration.data import DataConfig
from cairn.storage.errors import IntegrityError
from cairn.storage.stores import codec
from cairn.tasks.data import document_reader, source_files
from cairn.tasks.data.document import Document, InvalidCorpus, Piece, Source, make_document
from cairn.tasks.data.document_reader import EMPTY_FILE, HELD_OUT_END, SEPARATED, WHOLE_FILE, TextFile
from cairn.tasks.data.text_format import CHUNK_BYTES, TextFormat

# A preview checks a corpus up to this size; of a larger one it only finds the files.
PREVIEW_BYTES = 64 * 1024 * 1024
FEW_FILES = 100
"""Up to so many files of text the end of each is held out: of fewer documents a hash may take far too many or few."""

_CHECK_THREADS = 4
TOPICS = "python:topics"
DOCSTRINGS = "python:docstrings"
# Part of the content hash, which is of the source files: increase it when the extraction changes.
_EXTRACTION_VERSION = 1
# Tests, installed packages, and generated or machine-dependent files are not prose.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload", "__pycache__"}
_SKIPPED_FOLDERS |= {"__phello__", "idlelib", "lib2to3", "pydoc_data", "turtledemo", "ensurepip"}
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")

OnBytes: TypeAlias = Callable[[int, int], None]
_DECODER = codecs.getincrementaldecoder("utf-8")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def open_corpus(data: DataConfig, base_dir: Path, on_bytes: OnBytes | None = None) -> tuple[Source, ...]:
    """Find and check every source, sorted by group and name; relative paths start at `base_dir`.

    With `data.weights` each entry of `data.sources` and `data.val_sources` is a group. Calls on_bytes(checked, total)
    after each file. Raises InvalidCorpus for a source that is missing, empty, not UTF-8 or of an unsupported format, or
    in two groups.
    """
    return check_sources(find_sources(data, base_dir), on_bytes)


def find_sources(data: DataConfig, base_dir: Path) -> tuple[Source, ...]:
    """Return the sources as `open_corpus` does, but the files unchecked, with an empty `sha256`."""
    entries = (*data.sources, *data.val_sources)
    group_of = dict(zip(entries, data.source_names if data.weights else [""] * len(entries), strict=True))
    sources = list[Source]()
    for name in [name for name in group_of if name.startswith("python:")]:
        sources.append(_built_in_source(data, name, group_of.pop(name)))
    files = source_files.find_files(data, group_of, base_dir)
    texts = sum(file.unit == WHOLE_FILE for file in files)
    unit = WHOLE_FILE
    if data.separator:
        unit = SEPARATED
    elif not data.val_sources and (data.split == "end" or (data.split == "auto" and texts <= FEW_FILES)):
        unit = HELD_OUT_END
    for file in files:
        found = replace(file, unit=unit) if file.unit == WHOLE_FILE else file
        # A text of unknown size is taken for one that is not compressed.
        sources.append(_source(data, found, sha256="", text_bytes=file.bytes))
    return tuple(sorted(sources, key=lambda source: (source.group, source.name)))


def check_sources(sources: Sequence[Source], on_bytes: OnBytes | None = None) -> tuple[Source, ...]:
    """Return the sources that `find_sources` found checked, in the same order; raises InvalidCorpus."""
    checked, total, done = list[Source](), sum(source.bytes for source in sources), 0
    with ThreadPoolExecutor(_CHECK_THREADS, thread_name_prefix="check") as pool:
        for source in pool.map(lambda one: one.check() if one.check else one, sources):
            checked.append(source)  # at an error, the pool cancels what has not begun
            done += source.bytes
            if on_bytes:
                on_bytes(done, total)
    return tuple(checked)


def preview_corpus(data: DataConfig, base_dir: Path) -> tuple[Source, ...]:
    """Return the sources as `open_corpus` does, but those of a large corpus unchecked, with an empty `sha256`."""
    found = find_sources(data, base_dir)
    return check_sources(found) if sum(source.bytes for source in found) <= PREVIEW_BYTES else found


def _built_in_source(data: DataConfig, name: str, group: str) -> Source:
    """Return the source of this name, its documents in the split that the configuration says, if it says one."""
    source = replace(open_python_source(name), group=group)
    if not (placed := data.placed(name)):
        return source
    return replace(source, placed=placed, pieces=lambda: (replace(item, placed=placed) for item in source.documents()))


def _source(data: DataConfig, file: TextFile, *, sha256: str, text_bytes: int) -> Source:
    border = int(text_bytes * (1 - data.val_fraction)) if file.unit == HELD_OUT_END else None
    form = "" if file.format in (TextFormat.TEXT, TextFormat.JSON_LINES, TextFormat.PARQUET) else str(file.format)
    if data.loss_on:
        form = f"{form} conversations {codec.sha256(codec.encode(file.template))}".strip()
    return Source(
        name=file.name,
        bytes=file.bytes,
        sha256=sha256,
        unit=file.unit,
        pieces=partial(_pieces, data, file, sha256, border, text_bytes),
        group=file.group,
        border=border,
        text_bytes=text_bytes,
        placed=file.placed,
        form=form,
        places_of=partial(_describe_places, file),
        check=None if sha256 else partial(_check, data, file),
    )


def _check(data: DataConfig, file: TextFile) -> Source:
    """Hash the file; a text whose end is held out must be UTF-8 (RFC 3629) and, unless a glob found it, not empty."""
    text_bytes, has_text = 0, False
    with _open_hashed(file) as (stream, hash_to_end):
        if file.unit == HELD_OUT_END:
            text, decoder = document_reader.decompress(stream, file.codec, file.bytes), _DECODER()
            chunk = b" "
            while chunk:
                chunk = text.read(CHUNK_BYTES)
                pending = len(decoder.getstate()[0])
                try:
                    decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as problem:
                    byte, offset = problem.object[problem.start], text_bytes - pending + problem.start
                    what = f"undecodable byte 0x{byte:02x} at offset {offset} ({problem.reason})"
                    raise file.invalid(what, "UTF-8 text; convert the file, or leave it out") from problem
                text_bytes, has_text = text_bytes + len(chunk), has_text or bool(chunk.strip())
        digest = hash_to_end()
    if file.unit == HELD_OUT_END and not has_text:
        if not file.is_matched:
            what = "the file holds only white space" if text_bytes else "the file is empty"
            raise file.invalid(what, "every source has text; fill the file, or leave it out")
        file, text_bytes = replace(file, unit=EMPTY_FILE), 0
    return _source(data, replace(file, bytes=stream.bytes), sha256=digest, text_bytes=text_bytes)


def _describe_places(file: TextFile, offsets: Collection[int]) -> Mapping[int, str]:
    with _convert_errors(file), file.opener() as stream:
        return document_reader.describe_places(stream, file, offsets)


def _pieces(data: DataConfig, file: TextFile, digest: str, border: int | None, text_bytes: int) -> Iterator[Piece]:
    """Yield the pieces; raises InvalidCorpus at the end if the file no longer has `digest`."""
    read = partial(document_reader.read_pieces, file=file, data=data, border=border, text_bytes=text_bytes)
    try:
        if file.format == TextFormat.PARQUET:  # a table is not read from front to back, so it is hashed afterwards
            with _convert_errors(file), file.opener() as table:
                yield from read(table)
            found = _sha256_of(file) if digest else ""
        else:
            with _open_hashed(file) as (stream, hash_to_end):
                yield from read(stream)
                found = hash_to_end() if digest else ""
    except InvalidCorpus as problem:
        if digest and _sha256_of(file) != digest:
            raise _changed(file) from problem
        raise
    if found != digest:
        raise _changed(file)


def _changed(file: TextFile) -> InvalidCorpus:
    return file.invalid("changed while it was read", "sources stand still while a snapshot is built; run it again")


def _sha256_of(file: TextFile) -> str:
    with _open_hashed(file) as (_, hash_to_end):
        return hash_to_end()


@contextmanager
def _convert_errors(file: TextFile) -> Iterator[None]:
    try:
        yield
    except (OSError, IntegrityError, pa.ArrowException) as problem:
        raise file.unreadable(problem) from problem


@contextmanager
def _open_hashed(file: TextFile) -> Iterator[tuple[Any, Callable[[], str]]]:
    """Yield the open file, and a function that reads it to its end and returns the hash of all that was read."""
    digest = hashlib.sha256()
    with _convert_errors(file), file.opener() as inner:
        stream = document_reader.WatchedStream(inner, digest.update)

        def hash_to_end() -> str:
            while stream.read(CHUNK_BYTES):
                pass
            return digest.hexdigest()

        yield stream, hash_to_end


def open_python_source(source: str) -> Source:
    """Return the built-in source of this name; raises InvalidCorpus."""
    if source == DOCSTRINGS:
        return docstrings_source(Path(sysconfig.get_path("stdlib")))
    if source != TOPICS:
        raise InvalidCorpus(f"data.sources = {source!r}: unknown built-in corpus; rule: one of {TOPICS}, {DOCSTRINGS}")
    from pydoc_data.topics import topics  # half a megabyte

    documents = _in_a_row(TOPICS, (text.strip().encode("utf-8") for _, text in sorted(topics.items())))
    size_bytes = sum(item.bytes for item in documents)
    digest = codec.sha256("".join(item.sha256 for item in documents).encode())
    return Source(name=TOPICS, bytes=size_bytes, sha256=digest, unit="topic", pieces=lambda: iter(documents))


def docstrings_source(library: Path) -> Source:
    """Return the docstrings of all modules below `library`; raises InvalidCorpus for a Python without source files."""
    paths = sorted(_walk(library), key=Path.as_posix)
    digest, size_bytes = hashlib.sha256(f"extraction {_EXTRACTION_VERSION}\n".encode()), 0
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(library).as_posix()} {len(content)}\n".encode())
        digest.update(content)
        size_bytes += len(content)
    if not paths:
        rule = f"this Python carries its sources. Use another Python, or {TOPICS!r}, or a text file"
        raise InvalidCorpus(f"data.sources = {DOCSTRINGS!r}: no source files under {library}; rule: {rule}")
    found = digest.hexdigest()
    return Source(
        name=DOCSTRINGS, bytes=size_bytes, sha256=found, unit="module", pieces=lambda: iter(_documents(library, found))
    )


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name not in _SKIPPED_FOLDERS and not path.name.startswith(_SKIPPED_PREFIXES):
            if path.is_dir():
                yield from _walk(path)
            elif path.suffix == ".py":
                yield path


# Read twice (tokenizer training, encoding), two megabytes, seconds to parse.
@cache
def _documents(library: Path, _content_sha256: str) -> tuple[Document, ...]:
    gc.disable()  # a search for garbage among objects that stay would be a quarter of the time
    try:
        texts = []
        for path in sorted(_walk(library), key=Path.as_posix):
            parts = path.relative_to(library).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
            texts.append(module_text(path.read_bytes(), name).encode("utf-8"))
    finally:
        gc.enable()
    return _in_a_row(DOCSTRINGS, texts)


def _in_a_row(source: str, texts: Iterable[bytes]) -> tuple[Document, ...]:
    """Return the texts that are not empty as documents, one behind the other."""
    documents, offset = list[Document](), 0
    for content in filter(None, texts):
        documents.append(make_document(source, offset, content))
        offset += len(content)
    return tuple(documents)


def module_text(content: bytes, module: str) -> str:
    """Return the docstrings of a module's source, each below its dotted name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError):
            return ""
    parts = [f"{name}\n\n{text}" for name, text in _docstrings(tree, module)]
    # Lone surrogates are legal in a Python string and not in UTF-8.
    return "\n\n".join(parts).encode("utf-8", errors="replace").decode("utf-8")


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a module or definition and of all in it, or of those in another statement."""
    if isinstance(node, _DOCUMENTED) and (text := (ast.get_docstring(node) or "").strip()):
        yield name, text
    for field in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, field, ()):
            if isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from _docstrings(child, f"{name}.{child.name}" if isinstance(child, _DOCUMENTED[1:]) else name)
