"""Encodes in a child process, while this one reads and writes; a child whose caches have grown is replaced.

Requests and answers are MessagePack, each behind its size in bytes. A request is a list of texts; an answer is the ids,
the count of each text, both as little-endian numbers, and the child's memory in bytes. The first request has one text,
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
from typing import IO, Any

import msgspec
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
        try:
            with self._sending:
                if self._is_spent:
                    with self._receiving:  # no answer is under way
                        self._start()
                _write(self._streams[0], list(texts))
                self._receiving.acquire()
            try:
                ids, counts, memory_bytes = _read(self._streams[1])
                self._is_spent = self._is_spent or memory_bytes > self._most_bytes
                return np.frombuffer(ids, "<u4"), np.frombuffer(counts, "<i8")
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
        assert self._child.stdin is not None and self._child.stdout is not None
        self._streams, self._is_spent = (self._child.stdin, self._child.stdout), False
        if sys.platform == "linux":
            for stream in self._streams:
                with suppress(OSError):  # this user's pipes are full
                    fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        _write(self._streams[0], [self._document])
        self._most_bytes = _read(self._streams[1])[2] + MOST_GROWTH_BYTES

    def _end(self) -> None:
        if self._child is not None:
            end_child(self._child)
            for stream in self._streams:
                with suppress(OSError):  # of bytes that a dead child did not take
                    stream.close()
        self._child, self._is_spent = None, True


def _write(stream: IO[bytes], record: object) -> None:
    content = msgspec.msgpack.encode(record)
    stream.write(len(content).to_bytes(8, "little") + content)
    stream.flush()


def _read(stream: IO[bytes]) -> Any:
    """Return the next record of a stream; raises ConnectionResetError at its end."""
    size = stream.read(8)
    content = stream.read(int.from_bytes(size, "little"))
    if len(size) < 8 or len(content) < int.from_bytes(size, "little"):
        raise ConnectionResetError("the other process has ended")
    return msgspec.msgpack.decode(content)


def return_freed_memory() -> None:
    """Give free memory of glibc's heap back to the system: loading a great vocabulary leaves a lot of it."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    encoder: FastEncoder | None = None
    while True:
        texts, ids, counts = _read(requests), b"", b""
        if encoder is None:
            encoder = FastEncoder(texts[0])
            return_freed_memory()
        else:
            ids, counts = (numbers.tobytes() for numbers in encoder.encode_flat(texts))
        _write(answers, (ids, counts, psutil.Process().memory_info().rss))


if __name__ == "__main__":
    with suppress(ConnectionResetError), open(0, "rb") as stdin, open(1, "wb") as stdout:
        _serve(stdin, stdout)
