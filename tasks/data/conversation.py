"""Reads the chat template beside a tokenizer, has a child process make text of conversations, and encodes it."""

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.model.configuration.data import DataConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.model.errors import InvalidInput
from cairn.storage.errors import IntegrityError
from cairn.storage.stores import child_process, regular_file
from cairn.tasks.data.chat_template import ChatTemplate, Rendered
from cairn.tasks.data.document import Document, InvalidCorpus
from cairn.tasks.data.remote_files import local_file

FIELDS = ("messages", "prompt", "completion", "tools")
"""The fields of a row that are read."""
EncodedTexts: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.bool_]]
"""Ids (N,), each text's count, and which tokens (N,) are a conversation's answers."""
_CONFIG, _TOKENS, _TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
_MOST_BYTES = 2 << 20
_CORE_SECONDS, _BYTES_PER_CORE_SECOND = 60, 1 << 15


def find_template(data: DataConfig, base_dir: Path) -> ChatTemplate | None:
    """Return the template beside `data.tokenizer`; None where it is no file or has none. Raises InvalidCorpus."""
    if not data.tokenizer.endswith(".json"):
        return None
    try:
        folder = local_file("data.tokenizer", data.tokenizer, base_dir, _CONFIG, _TOKENS, _TEMPLATE).parent
    except InvalidInput as error:
        raise InvalidCorpus(f"data.tokenizer = {data.tokenizer!r}: {error}") from error
    config, tokens = _document(folder / _CONFIG), dict[str, str]()
    for name, token in {**_document(folder / _TOKENS), **config}.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    found = _text(folder / _TEMPLATE) if (folder / _TEMPLATE).is_file() else config.get("chat_template")
    if isinstance(found, list):  # several by name, of which `transformers` takes this one
        found = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}.get("default")
    return ChatTemplate(text=found, tokens=tokens) if isinstance(found, str) else None


def render_rows(rows: Iterable[tuple[int, bytes]], template: ChatTemplate | None) -> Iterator[Rendered]:
    """Yield the text of each row of JSON, given with its offset, or its fault, in order; raises InvalidCorpus."""
    with tempfile.TemporaryFile() as file:
        file.write(msgspec.json.encode(template) + b"\n")
        for offset, row in rows:
            file.write(b"%d %d\n" % (offset, len(row)) + row)
        core_seconds = _CORE_SECONDS + file.tell() // _BYTES_PER_CORE_SECOND
        file.seek(0)
        options: Any = {"remedy": "Take another chat template", "core_seconds": core_seconds}
        try:
            with child_process.bounded_process("cairn.tasks.data.chat_template", file=file, **options) as lines:
                # Without its end a line is that of a child that has died.
                yield from (msgspec.json.decode(line, type=Rendered) for line in lines if line.endswith(b"\n"))
        except IntegrityError as error:
            raise InvalidCorpus(f"data.loss_on: {error}; rule: the chat template renders every conversation") from error


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document], *, has_answers: bool) -> EncodedTexts:
    """Return the tokens of documents; raises InvalidCorpus that names one that cannot be encoded."""
    try:
        if has_answers:
            return _encode_conversations(tokenizer, documents)
        ids, counts = tokenizer.encode_flat([document.text for document in documents])
        return ids, counts, np.zeros(len(ids), dtype=np.bool_)
    except InvalidInput as error:
        if len(documents) > 1:  # one of them is named
            for document in documents:
                encode_documents(tokenizer, [document], has_answers=has_answers)
            raise
        where = f"{documents[0].source}, offset {documents[0].offset_bytes}"
        rule = "text that it knows. Take another data.tokenizer, or leave the text out"
        raise InvalidCorpus(f"data.sources: {where}: {error}; rule: {rule}") from error


def _encode_conversations(tokenizer: Tokenizer, documents: Sequence[Document]) -> EncodedTexts:
    """Encode rendered conversations as `transformers` does; a token is an answer's if one of its characters is."""
    encodings = tokenizer.encode_spelled([document.text for document in documents])
    counts = np.fromiter(map(len, encodings), dtype=np.int64, count=len(encodings))
    masks = [np.zeros(count, dtype=np.bool_) for count in counts]
    for document, encoding, mask in zip(documents, encodings, masks, strict=True):
        begin, end = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T  # (n, 2) -> 2 x (n,)
        for first, stop in document.answers:
            mask |= (begin < stop) & (end > first) & (begin < end)
    ids = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
    joined = np.concatenate([np.zeros(0, dtype=np.bool_), *masks])
    return np.fromiter(ids, dtype=np.uint32, count=int(counts.sum())), counts, joined


def _document(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(_text(path), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidCorpus(f"data.tokenizer: {path}: {error}; rule: one JSON object") from error


def _text(path: Path) -> str:
    try:
        return regular_file.read_file(path, _MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidCorpus(f"data.tokenizer: {path} cannot be read: {error}; repair it or remove it") from error
