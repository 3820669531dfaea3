"""Encodes in a child process, while this one reads and writes; a child whose caches have grown is replaced.

A request is the number of texts, their sizes in bytes, and their UTF-8; an answer is the number of ids, the child's
memory in bytes, the count of each text, and the ids. All numbers are little-endian; the first request has one text,
the tokenizer.json.
Source: fastokens (Apache-2.0).
"""

import ctypes
import fcntl
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from subprocess import Popen
from typing import IO, Any, cast

import numpy as np
import psutil
from numpy.typing import NDArray

from cairn.storage.stores.child_process import DEVNULL, child_command, end_child, start_child

MOST_GROWTH_BYTES = 160 << 20
"""The caches of words stay below this; only those of texts that the tokenizer does not cut into words grow on."""
_PIPE_BYTES = 1 << 20
"""A whole batch lies in it, so that neither process waits for the other to read."""


class FastEncoder:
    """Encodes in this process, twenty times as fast as `tokenizers`; holds Python's lock, and its caches grow."""

    def __init__(self, document: str) -> None:
        """Load a tokenizer.json; raises ImportError without the library, and whatever it raises itself."""
        import fastokens

        self._inner: Any = fastokens.Tokenizer.from_json_str(document)

    def encode_flat(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return concatenated ids (N,) and each text's count (len(texts),)."""
        ids, offsets = self._inner.encode_batch_flat(list(texts), split_special_tokens=True)
        return np.frombuffer(ids, dtype="<u4"), np.diff(np.frombuffer(offsets, dtype="<u8")).astype(np.int64)

    def close(self) -> None:
        """Do nothing."""


class EncodingProcess:
    """A child process that encodes as a tokenizer.json says; its methods may be called in any thread."""

    def __init__(self, document: str) -> None:
        """Remember the tokenizer; the first call starts the child, which loads it."""
        self._document = document
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._child: Popen[bytes] | None = None
        self._is_spent, self._most_bytes = True, 0

    def encode_flat(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return concatenated ids (N,) and each text's count (len(texts),).

        Raises OSError if the child has ended, as it does without the library, and where the library fails; the next
        call starts another. While one call waits for its answer, the next sends: the child has no pause.
        """
        contents = [text.encode("utf-8") for text in texts]
        try:
            with self._sending:
                if self._is_spent:
                    with self._receiving:  # no answer is under way
                        self._start()
                self._send(contents)
                self._receiving.acquire()
            try:
                ids, counts, memory_bytes = self._receive(len(texts))
                self._is_spent = self._is_spent or memory_bytes > self._most_bytes
                return ids, counts
            finally:
                self._receiving.release()
        except OSError:
            self._is_spent = True
            raise

    def close(self) -> None:
        """End the child."""
        with self._sending, self._receiving:
            self._end()

    def _start(self) -> None:
        self._end()
        threads = max(1, len(os.sched_getaffinity(0)) - 1) if sys.platform == "linux" else 1
        environment = {**os.environ, "FASTOKENS_BPE_THREADS": str(threads)}
        self._child = start_child(child_command(__name__), stderr=DEVNULL, environment=environment)
        self._is_spent = False
        if sys.platform == "linux":
            for stream in (self._child.stdin, self._child.stdout):
                with suppress(OSError):  # this user's pipes are full
                    fcntl.fcntl(cast(IO[bytes], stream), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._send([self._document.encode("utf-8")])
        self._most_bytes = self._receive(1)[2] + MOST_GROWTH_BYTES

    def _send(self, contents: Sequence[bytes]) -> None:
        assert self._child is not None and self._child.stdin is not None
        sizes = np.array([len(contents), *map(len, contents)], dtype="<i8")
        self._child.stdin.write(sizes.tobytes() + b"".join(contents))
        self._child.stdin.flush()

    def _receive(self, count: int) -> tuple[NDArray[np.uint32], NDArray[np.int64], int]:
        assert self._child is not None
        tokens, memory_bytes = _read(self._child.stdout, "<i8", 2).tolist()
        counts = _read(self._child.stdout, "<i8", count)
        return _read(self._child.stdout, "<u4", tokens), counts, memory_bytes

    def _end(self) -> None:
        if (child := self._child) is not None:
            end_child(child)
            for stream in (child.stdin, child.stdout):
                with suppress(OSError):  # of bytes that a dead child did not take
                    stream.close()  # type: ignore[union-attr]
        self._child, self._is_spent = None, True


def _read(stream: Any, kind: str, count: int) -> NDArray[Any]:
    """Return the next numbers of a stream; raises ConnectionResetError at its end."""
    numbers = np.empty(count, dtype=kind)
    if stream.readinto(numbers.view(np.uint8)) != numbers.nbytes:
        raise ConnectionResetError("the other process has ended")
    return numbers


def return_freed_memory() -> None:
    """Give free memory of glibc's heap back to the system: loading a great vocabulary leaves a lot of it."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


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
        for numbers in (np.array([len(ids), psutil.Process().memory_info().rss], dtype="<i8"), counts, ids):
            answers.write(numbers.tobytes())
        answers.flush()


if __name__ == "__main__":
    with suppress(ConnectionResetError), open(0, "rb") as stdin, open(1, "wb") as stdout:
        _serve(stdin, stdout)
