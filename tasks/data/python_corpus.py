"""The sources `python:topics` and `python:docstrings` (by `ast`): text of every CPython, for a first run offline."""

import ast
import gc
import hashlib
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from storage.stores.document import sha256
from tasks.data.document import Document, InvalidCorpus, Source, make_document

TOPICS = "python:topics"
DOCSTRINGS = "python:docstrings"
# Part of the content hash, which is of the source files: increase it when the extraction changes.
_EXTRACTION_VERSION = 1
# Tests, installed packages, and generated or machine-dependent files are not prose.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload", "__pycache__", "__phello__"}
    | {"idlelib", "lib2to3", "pydoc_data", "turtledemo", "ensurepip"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def open_python_source(source: str) -> Source:
    """Return the built-in source of this name; raises InvalidCorpus."""
    if source == DOCSTRINGS:
        return docstrings_source(Path(sysconfig.get_path("stdlib")))
    if source != TOPICS:
        raise InvalidCorpus(f"data.sources = {source!r}: unknown built-in corpus; rule: one of {TOPICS}, {DOCSTRINGS}")
    from pydoc_data.topics import topics  # half a megabyte

    documents = _in_a_row(TOPICS, (text.strip().encode("utf-8") for _, text in sorted(topics.items())))
    size_bytes = sum(document.bytes for document in documents)
    digest = sha256("".join(document.sha256 for document in documents).encode())
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
        raise InvalidCorpus(
            f"data.sources = {DOCSTRINGS!r}: no source files under {library}; rule: this Python carries its sources. "
            f"Use another Python, or {TOPICS!r}, or a text file"
        )
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
    gc.disable()  # looking for garbage among what stays would be a quarter of the time
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


def _docstrings(node: ast.Module | _Definition, name: str) -> Iterator[tuple[str, str]]:
    if text := (ast.get_docstring(node) or "").strip():
        yield name, text
    for child in _definitions(node):
        yield from _docstrings(child, f"{name}.{child.name}")


def _definitions(node: ast.AST) -> Iterator[_Definition]:
    for field in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, field, ()):
            if isinstance(child, _Definition):
                yield child
            elif isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from _definitions(child)
