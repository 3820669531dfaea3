"""Encodes in a child process, while this one reads and writes; a child whose caches have grown is replaced.

A request is the number of texts, their sizes in bytes, and their UTF-8; an answer is the number of ids, the child's
memory in bytes, the count of each text, and the ids. All numbers are little-endian; the first request has one text,
the tokenizer.json.
"""

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from cairn.model.data.fast_encoder import FastEncoder, FlatIds, return_freed_memory
from cairn.storage.stores.child_process import DEVNULL, child_command, end_child, start_child

MOST_GROWTH_BYTES = 160 << 20
"""The caches of words stay below this; only those of texts that the tokenizer does not cut into words grow on."""
_STATUS = Path("/proc/self/statm")


class EncodingProcess:
    """A child process that encodes as a tokenizer.json says; its methods may be called in any thread."""

    def __init__(self, document: str) -> None:
        """Start the child, which loads the tokenizer."""
        self._document, self._lock = document, threading.Lock()
        self._child: Popen[bytes] | None = None
        self._most_bytes = 0

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        """Return concatenated ids (N,) and each text's count (len(texts),).

        Raises OSError if the child has ended, as it does without the library, and where the library fails; the next
        call starts another.
        """
        with self._lock:
            if self._child is None:
                self._start()
            try:
                ids, counts, memory_bytes = self._ask(texts)
            except OSError:
                self._end()
                raise
            if memory_bytes > self._most_bytes:
                self._end()
            return ids, counts

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        threads = max(1, len(os.sched_getaffinity(0)) - 1) if sys.platform == "linux" else 1
        environment = {**os.environ, "FASTOKENS_BPE_THREADS": str(threads)}
        self._child = start_child(child_command(__name__), stderr=DEVNULL, environment=environment)
        try:
            self._most_bytes = self._ask([self._document])[2] + MOST_GROWTH_BYTES
        except OSError:
            self._end()
            raise

    def _ask(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64], int]:
        assert self._child is not None and self._child.stdin is not None and self._child.stdout is not None
        _send(self._child.stdin, [text.encode("utf-8") for text in texts])
        tokens, memory_bytes = _read(self._child.stdout, "<i8", 2).tolist()
        counts = _read(self._child.stdout, "<i8", len(texts))
        return _read(self._child.stdout, "<u4", tokens), counts, memory_bytes

    def _end(self) -> None:
        if (child := self._child) is not None:
            end_child(child)
            for stream in (child.stdin, child.stdout):
                with suppress(OSError):  # of bytes that a dead child did not take
                    stream.close()  # type: ignore[union-attr]
        self._child = None


def _send(stream: IO[bytes], contents: Sequence[bytes]) -> None:
    stream.write(np.array([len(contents), *map(len, contents)], dtype="<i8").tobytes())
    stream.write(b"".join(contents))
    stream.flush()


def _read(stream: Any, kind: str, count: int) -> NDArray[Any]:
    """Return the next numbers of a stream; raises ConnectionResetError at its end."""
    numbers = np.empty(count, dtype=kind)
    if stream.readinto(numbers.view(np.uint8)) != numbers.nbytes:
        raise ConnectionResetError("the other process has ended")
    return numbers


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    encoder: FastEncoder | None = None
    while True:
        (count,) = _read(requests, "<i8", 1).tolist()
        ends = np.cumsum(_read(requests, "<i8", count)).tolist()
        content = _read(requests, "<u1", ends[-1] if ends else 0).tobytes()
        texts = [content[start:end].decode("utf-8") for start, end in zip([0, *ends], ends, strict=False)]
        ids, counts = np.empty(0, "<u4"), np.zeros(count, "<i8")
        if encoder is None:
            encoder = FastEncoder(texts[0])
            return_freed_memory()
        else:
            ids, counts = encoder.encode_flat(texts)
        for numbers in (np.array([len(ids), _memory_bytes()], dtype="<i8"), counts, ids):
            answers.write(numbers.tobytes())
        answers.flush()


def _memory_bytes() -> int:
    if not _STATUS.exists():
        return 0
    return int(_STATUS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    with suppress(ConnectionResetError), open(0, "rb") as stdin, open(1, "wb") as stdout:
        _serve(stdin, stdout)
