"""Training windows over token shards, without copying the shards."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from cairn.model.errors import InvalidInput, TokenOutOfRange


class TokenRow(Protocol):
    """A shard: a row of tokens (N,) whose slices are arrays, such as an array or one that is read lazily."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> Any: ...


def first_tokens(windows: NDArray[np.int64], *, window_count: int, block_size: int) -> NDArray[np.int64]:
    """Return the first token (N,) of each window (N,): `window_count` windows tile the stream, the rest begin later.

    Window i < window_count begins at token i * block_size; window i + k * window_count begins k tokens after window i.
    """
    later, tiled = np.divmod(windows, window_count)
    starts: NDArray[np.int64] = tiled * block_size + later
    return starts


class TokenWindows:
    """Windows of block_size + 1 tokens over the concatenation of shards.

    Inputs tile the stream, a window's last token is only a target; later beginnings come next (`first_tokens`).
    Where the loss counts answers alone, the id of a token that is in none has its bits inverted: it is below 0.
    """

    def __init__(
        self, shards: Sequence[TokenRow], block_size: int, vocab_size: int, answers: Sequence[TokenRow] = ()
    ) -> None:
        """Take shards (N_k,) in order, and which of their tokens are answers; InvalidInput for less than one window."""
        self._shards = tuple(shards)
        self._answers = TokenWindows(answers, block_size, 2) if answers else None
        self._windows_of_shard: dict[int, NDArray[Any]] = {}
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)], dtype=np.int64)
        self.block_size, self.vocab_size = block_size, vocab_size
        self.token_count = int(self._starts[-1])
        if self.window_count < 1:
            problem = f"block_size={block_size} must be shorter than the data, which has {self.token_count} tokens"
            raise InvalidInput(f"{problem}; lower model.block_size or add text")

    def over(self, shards: Sequence[TokenRow]) -> "TokenWindows":
        """Return the same windows over other shards of the same tokens' places."""
        windows = TokenWindows(shards, self.block_size, self.vocab_size)
        windows._answers = self._answers
        return windows

    @property
    def window_count(self) -> int:
        """Number of whole windows."""
        return max(0, self.token_count - 1) // self.block_size

    def first_tokens(self, indexes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first token (B,) of the windows `indexes` (B,); one that is not there raises InvalidInput."""
        positions = first_tokens(indexes, window_count=self.window_count, block_size=self.block_size)
        is_outside = (indexes < 0) | (indexes >= self.window_count * self.block_size)
        outside = indexes[is_outside | (positions + self.block_size >= self.token_count)]
        if len(outside):
            raise InvalidInput(f"window {outside[0]} must be in [0, {self.window_count}), or begin before the last one")
        return positions

    def gather(self, indexes: NDArray[np.int64], into: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Copy windows (B,) -> ids (B, block_size + 1), `into` if given; TokenOutOfRange outside the vocabulary."""
        gathered = np.empty((len(indexes), self.block_size + 1), dtype=np.int64) if into is None else into
        positions = self.first_tokens(indexes)
        shards = np.searchsorted(self._starts, positions, side="right") - 1
        is_whole = positions + self.block_size < self._starts[shards + 1]
        for shard in np.unique(shards[is_whole]).tolist():
            rows = np.flatnonzero(is_whole & (shards == shard))
            if shard not in self._windows_of_shard:  # on first use: reading all of it verifies the shard
                tokens = np.asarray(self._shards[shard][:])
                self._windows_of_shard[shard] = sliding_window_view(tokens, self.block_size + 1)  # a row a start
            gathered[rows] = self._windows_of_shard[shard][positions[rows] - self._starts[shard]]
        for row in np.flatnonzero(~is_whole).tolist():
            shard, filled = int(shards[row]), 0
            while filled <= self.block_size:
                start = int(positions[row]) + filled - int(self._starts[shard])
                piece = self._shards[shard][start : start + self.block_size + 1 - filled]
                gathered[row, filled : filled + len(piece)] = piece
                shard, filled = shard + 1, filled + len(piece)
        if gathered.max(initial=0) >= self.vocab_size:
            row, column = np.argwhere(gathered >= self.vocab_size)[0]
            window, token = int(indexes[row]), int(gathered[row, column])
            raise TokenOutOfRange(window=window, token=token, vocab_size=self.vocab_size)
        if self._answers is not None:
            np.invert(gathered, out=gathered, where=self._answers.gather(indexes) == 0)
        return gathered

    def count_targets(self, indexes: NDArray[np.int64]) -> int:
        """Return how many targets of the windows `indexes` (B,) the loss counts."""
        if self._answers is None:
            return len(indexes) * self.block_size
        return int(self._answers.gather(indexes)[:, 1:].sum())
