"""Training windows over token shards, read where they lie.

Owns the cut of a token stream into windows. Refuses to know files, the order of samples and tensors.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.errors import InvalidInput, TokenOutOfRange

SHARD_DTYPES = (np.dtype(np.uint16), np.dtype(np.uint32))


class TokenWindows:
    """Windows of block_size + 1 tokens over the concatenation of shards; memory maps stay memory maps.

    Window i covers tokens [i * block_size, i * block_size + block_size], so inputs tile the stream and each window's
    last token is only ever a target there.
    """

    def __init__(self, shards: Sequence[NDArray[Any]], block_size: int, vocab_size: int) -> None:
        """Take uint16 or uint32 shards (N_k,) in order; InvalidInput when they hold less than one window."""
        for number, shard in enumerate(shards):
            if shard.ndim != 1 or shard.dtype not in SHARD_DTYPES:
                raise InvalidInput(
                    f"shard {number} is {shard.shape} {shard.dtype}; must be one row of uint16 or uint32"
                )
        if block_size < 1 or vocab_size < 1:
            raise InvalidInput(f"block_size={block_size} and vocab_size={vocab_size} must be at least 1")
        self._shards = tuple(shards)
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)], dtype=np.int64)
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.token_count = int(self._starts[-1])
        if self.window_count < 1:
            raise InvalidInput(
                f"block_size={block_size} must be shorter than the data, which has {self.token_count} tokens; "
                "lower model.block_size or add text"
            )

    @property
    def window_count(self) -> int:
        """Number of whole windows."""
        return max(0, self.token_count - 1) // self.block_size

    def gather(self, indexes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Copy the windows `indexes` (B,) -> token ids (B, block_size + 1); a bad id is a TokenOutOfRange."""
        gathered = np.empty((len(indexes), self.block_size + 1), dtype=np.int64)
        for row, index in enumerate(indexes.tolist()):
            if not 0 <= index < self.window_count:
                raise InvalidInput(f"window {index} must be in [0, {self.window_count})")
            self._copy_window(index, gathered[row])
        if gathered.max(initial=0) >= self.vocab_size:
            row, column = np.argwhere(gathered >= self.vocab_size)[0]
            raise TokenOutOfRange(
                window=int(indexes[row]), token=int(gathered[row, column]), vocab_size=self.vocab_size
            )
        return gathered

    def _copy_window(self, index: int, into: NDArray[np.int64]) -> None:
        position = index * self.block_size
        shard = int(np.searchsorted(self._starts, position, side="right")) - 1
        filled = 0
        while filled < len(into):
            start = position + filled - int(self._starts[shard])
            piece = self._shards[shard][start : start + len(into) - filled]
            into[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
