"""A token shard that is fetched, hashed and mapped when its first token is asked for, and never before.

Owns that no token leaves an unverified shard, whichever thread asks first. Refuses to know manifests, stores and
caches: what fetches must verify. It reads as a NumPy row does: length, slices, conversion.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import IntegrityError
from storage.snapshots.token_shard import ShardSchema, map_shard


class VerifiedShard:
    """Tokens (N,) of a shard as a read-only view of its memory map, believed only once every byte was hashed."""

    ndim = 1

    def __init__(self, fetch: Callable[[], Path], schema: ShardSchema, *, tokens: int, where: str) -> None:
        """Take `fetch`, which verifies the file and returns where it lies; `tokens` is what it must hold."""
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
    def size(self) -> int:
        """Number of tokens."""
        return self._length

    @property
    def is_verified(self) -> bool:
        """Whether the file was hashed already."""
        return self._tokens is not None

    def tokens(self) -> NDArray[Any]:
        """Return the tokens; the first call verifies them.

        Raises SnapshotDamaged naming the shard where a byte of it is another, at this call and at every one after it.
        """
        if self._tokens is None:
            with self._lock:
                if self._tokens is None:
                    self._tokens = self._mapped()
        return self._tokens

    def copy(self) -> NDArray[Any]:
        """Return the tokens in memory of their own, verified."""
        return self.tokens().copy()

    def __len__(self) -> int:
        """Return the number of tokens; needs no file."""
        return self._length

    def __getitem__(self, place: Any) -> Any:
        """Return tokens as NumPy would; the first call verifies the shard."""
        return self.tokens()[place]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the whole shard as an array, verified."""
        return np.array(self.tokens(), dtype=dtype, copy=copy)

    def _mapped(self) -> NDArray[Any]:
        tokens = map_shard(self._fetch(), self._schema, where=self._where)
        if len(tokens) != self._length:
            raise IntegrityError(f"{self._where}: holds {len(tokens)} tokens, its manifest says {self._length}")
        return tokens
