"""Has a child process make text of conversations, and encodes it."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.model.data.tokenizer import Tokenizer
from cairn.model.errors import InvalidInput
from cairn.storage.errors import IntegrityError
from cairn.storage.stores.child_process import bounded_process
from cairn.tasks.data.chat_template import ChatTemplate, Rendered
from cairn.tasks.data.document import Document, InvalidCorpus

FIELDS = ("messages", "prompt", "completion", "tools")
"""The fields of a row that are read."""
EncodedTexts: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.bool_]]
"""Ids (N,), each text's count, and which tokens (N,) are a conversation's answers."""
_CORE_SECONDS, _BYTES_PER_CORE_SECOND = 60, 1 << 15


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
            with bounded_process("cairn.tasks.data.chat_template", file=file, **options) as lines:
                # Without its end a line is that of a child that has died.
                yield from (msgspec.json.decode(line, type=Rendered) for line in lines if line.endswith(b"\n"))
        except IntegrityError as error:
            raise InvalidCorpus(f"data.loss_on: {error}; rule: the chat template renders every conversation") from error


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document], *, has_answers: bool) -> EncodedTexts:
    """Return the tokens of documents; raises InvalidCorpus that names one that cannot be encoded.

    Rendered conversations are encoded as `transformers` does; a token is an answer's if one of its characters is.
    """
    texts = [document.text for document in documents]
    try:
        if not has_answers:
            ids, counts = tokenizer.encode_flat(texts)
            return ids, counts, np.zeros(len(ids), dtype=np.bool_)
        encodings = tokenizer.encode_spelled(texts)
    except InvalidInput as error:
        if len(documents) > 1:  # one of them is named
            for document in documents:
                encode_documents(tokenizer, [document], has_answers=has_answers)
            raise
        where = f"{documents[0].source}, offset {documents[0].offset_bytes}"
        rule = "text that it knows. Take another data.tokenizer, or leave the text out"
        raise InvalidCorpus(f"data.sources: {where}: {error}; rule: {rule}") from error
    counts = np.fromiter(map(len, encodings), dtype=np.int64, count=len(encodings))
    masks = [np.zeros(count, dtype=np.bool_) for count in counts]
    for document, encoding, mask in zip(documents, encodings, masks, strict=True):
        begin, end = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T  # (n, 2) -> 2 x (n,)
        for first, stop in document.answers:
            mask |= (begin < stop) & (end > first) & (begin < end)
    ids = np.concatenate([np.zeros(0, dtype=np.uint32), *(np.array(one.ids, dtype=np.uint32) for one in encodings)])
    return ids, counts, np.concatenate([np.zeros(0, dtype=np.bool_), *masks])
