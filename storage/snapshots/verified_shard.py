"""A token shard that is fetched, hashed and mapped at its first use, and behaves like a NumPy row."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import IntegrityError, StorageError
from storage.snapshots.token_shard import ShardSchema, map_shard


class VerifiedShard:
    """Tokens (N,) of a shard as a read-only memory map; thread-safe."""

    ndim = 1

    def __init__(self, fetch: Callable[[], Path], schema: ShardSchema, *, tokens: int, where: str) -> None:
        """`fetch` verifies the file and returns its path; `tokens` is the number it must hold."""
        self._fetch, self._schema, self._length, self._where = fetch, schema, tokens, where
        self._lock = threading.Lock()
        self._tokens: NDArray[Any] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Token width."""
        return self._schema.dtype

    @property
    def shape(self) -> tuple[int]:
        """One row."""
        return (self._length,)

    @property
    def is_verified(self) -> bool:
        """Whether the file is already hashed."""
        return self._tokens is not None

    def tokens(self) -> NDArray[Any]:
        """Return the tokens; the first call verifies the file. Every call raises SnapshotDamaged for a damaged one."""
        if self._tokens is None:
            with self._lock:
                if self._tokens is None:
                    self._tokens = self._map()
        return self._tokens

    def __len__(self) -> int:
        return self._length  # needs no file

    def __getitem__(self, place: Any) -> Any:
        return self.tokens()[place]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.tokens(), dtype=dtype, copy=copy)

    def _map(self) -> NDArray[Any]:
        tokens = map_shard(self._fetch(), self._schema, where=self._where)
        if len(tokens) != self._length:
            raise IntegrityError(f"{self._where}: holds {len(tokens)} tokens, its manifest says {self._length}")
        return tokens


def prefetch_shards(shards: Iterable[VerifiedShard], *, threads: int) -> None:
    """Start to verify the shards in order in daemon threads; errors are raised by the shard's next use.

    A shuffled order needs every shard within its first steps; fetched one by one, an object store's links stay idle.
    """
    waiting = deque(shard for shard in shards if not shard.is_verified)
    for number in range(min(threads, len(waiting))):
        threading.Thread(target=_verify_all, args=(waiting,), name=f"prefetch-{number}", daemon=True).start()


def _verify_all(waiting: deque[VerifiedShard]) -> None:
    while True:
        try:
            shard = waiting.popleft()
        except IndexError:
            return
        with suppress(StorageError, OSError):
            shard.tokens()
