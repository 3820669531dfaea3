"""Keeps of the folder that weights came from its name, licence and hashes, and the documents that exports carry on.

It lies under `initial/<sha256>/source.json`. Documents are bounded texts under known names, and no code.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cairn.model.errors import InvalidInput
from cairn.storage.errors import IntegrityError
from cairn.storage.stores import codec
from cairn.storage.stores.object_store import ExpectedObject, ObjectStore, read_verified
from cairn.storage.stores.regular_file import read_file

CONFIG = "config.json"
TOKENIZER, CARD = "tokenizer.json", "README.md"
SOURCE, KEPT = "source.json", "weights.safetensors"
"""The objects of initial weights in a store."""
CHAT_TEMPLATE = "chat_template.jinja"
_OF_NETWORK = (CONFIG, "generation_config.json")
_OF_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", CHAT_TEMPLATE)
CARRIED = _OF_NETWORK + _OF_TOKENIZER
_MOST_DOCUMENT_BYTES, _MOST_BYTES, _MOST_CARD_BYTES, _MOST_LICENCE = 2 << 20, 8 << 20, 1 << 20, 100


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsSource:
    """A folder of weights: `files` has the SHA-256 of each one that was used, `documents` the text of those carried.

    `licence` is that of its README.md, or empty. Its tokenizer is among `files` if the run has the same.
    """

    name: str
    licence: str
    files: Mapping[str, str]
    documents: Mapping[str, str]

    @property
    def has_tokenizer(self) -> bool:
        """Whether the run's tokenizer is the folder's, so that its documents hold for it."""
        return TOKENIZER in self.files

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids with which its texts end, if the run has its tokenizer: that of a turn too."""
        found = set[int]()
        for name in (name for name in _OF_NETWORK if self.has_tokenizer and name in self.documents):
            ends = parse_document(name, self.documents[name]).get("eos_token_id")
            found.update(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int))
        return frozenset(found)


def describe_source(folder: Path, weights: Mapping[str, str], *, has_tokenizer: bool, url: str = "") -> WeightsSource:
    """Read what is kept of a folder whose weight files have these hashes; raises InvalidInput naming the file."""
    names = CARRIED if has_tokenizer else _OF_NETWORK
    documents = {name: _document(folder / name) for name in names if (folder / name).exists()}
    files = {name: codec.sha256(text.encode()) for name, text in documents.items()} | dict(weights)
    if has_tokenizer:
        files[TOKENIZER] = codec.sha256(read_file(folder / TOKENIZER, 64 << 20))
    return WeightsSource(name=url or folder.resolve().name, licence=_licence(folder), files=files, documents=documents)


def keep_source(store: ObjectStore, source: WeightsSource) -> str:
    """Store it under its SHA-256, which is returned; raises InvalidInput for documents that are too large together."""
    if len(content := codec.encode(source)) > _MOST_BYTES:
        raise InvalidInput(f"{', '.join(source.documents)}: {len(content):,} bytes; rule: at most {_MOST_BYTES:,}")
    sha256 = codec.sha256(content)
    store.write(initial_key(sha256, SOURCE), content)
    return sha256


def read_source(store: ObjectStore, sha256: str) -> WeightsSource:
    """Return a stored source; raises IntegrityError if it is missing, or a byte has changed."""
    promised = promised_object(store, sha256, SOURCE)
    return codec.decode(bytes(read_verified(store, promised)), WeightsSource, where=promised.key)


def promised_object(store: ObjectStore, sha256: str, name: str) -> ExpectedObject:
    """Return the stored object of initial weights or of their source; raises IntegrityError if it is missing."""
    if (size := store.size(key := initial_key(sha256, name))) is None:
        raise IntegrityError(f"{key}: missing, and the run started from it; restore it, or start another run")
    return ExpectedObject(key=key, bytes=size, sha256=sha256)


def initial_key(sha256: str, name: str) -> str:
    """Return the key of an object that a run begins with."""
    return f"initial/{sha256}/{name}"


def parse_document(name: str, text: str) -> dict[str, Any]:
    """Return a JSON document as it is carried: without the Python files that `transformers` would run for it."""
    try:
        content = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"{name}: {error}; rule: one JSON object") from error
    content.pop("auto_map", None)
    return content


def _document(path: Path) -> str:
    try:
        text = read_file(path, _MOST_DOCUMENT_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path.name} cannot be read: {error}; repair it or remove it") from error
    if path.name != CHAT_TEMPLATE:
        parse_document(path.name, text)
    return text


def _licence(folder: Path) -> str:
    """Return the licence that the front matter of a model card names, empty without one."""
    try:
        first, *lines = read_file(folder / CARD, _MOST_CARD_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        return ""
    front = itertools.takewhile(lambda line: line != "---", lines if first == "---" else ())
    named = (line.partition(":")[2].strip(" \"'") for line in front if line.startswith("license:"))
    return next(named, "")[:_MOST_LICENCE]
