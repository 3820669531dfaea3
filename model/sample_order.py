"""Which windows each step trains on, as a pure function.

Owns epochs, shuffling and the replacement of quarantined windows. Refuses to know tokens and to hold a position: there
is no loader state to save, at any resume point.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model.errors import InvalidInput
from model.permutation import Permutation


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The order of samples of a run; equal fields give equal batches on every machine.

    Every epoch is a fresh permutation of all windows, so no window is drawn twice in an epoch. The draw of a
    quarantined window yields another, readable window instead (which therefore comes once more in that epoch); no other
    draw moves.
    """

    window_count: int
    seed: int
    global_batch: int
    quarantined: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        """Refuse sizes that leave nothing to draw."""
        for name in ("window_count", "global_batch"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name}={getattr(self, name)} must be at least 1")
        strange = [window for window in self.quarantined if not 0 <= window < self.window_count]
        if strange:
            raise InvalidInput(f"quarantined={min(strange)} must be a window in [0, {self.window_count})")
        if len(self.quarantined) >= self.window_count:
            raise InvalidInput(f"quarantined holds all {self.window_count} windows; at least one must be left to train")

    def cursor_of(self, step: int) -> int:
        """Return the number of samples drawn once `step` steps are complete: where the next draw starts."""
        if step < 0:
            raise InvalidInput(f"step={step} must not be negative")
        return step * self.global_batch

    def windows_of(self, step: int) -> NDArray[np.int64]:
        """Return the window indexes (global_batch,) of the batch drawn when `step` steps are complete (0-based)."""
        first = self.cursor_of(step)
        draws = np.arange(first, first + self.global_batch, dtype=np.int64)
        epochs, positions = np.divmod(draws, self.window_count)
        windows = np.empty_like(draws)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            windows[chosen] = self._permutation(int(epoch), "draw").permute(positions[chosen])
        return self._without_quarantined(windows, epochs, positions)

    def _without_quarantined(
        self, windows: NDArray[np.int64], epochs: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        if not self.quarantined:
            return windows
        for index in np.flatnonzero(np.isin(windows, np.fromiter(self.quarantined, dtype=np.int64))):
            windows[index] = self._replacement(int(epochs[index]), int(positions[index]))
        return windows

    def _replacement(self, epoch: int, position: int) -> int:
        spare = self._permutation(epoch, "replacement")
        while True:
            window = int(spare.permute(np.array([position % self.window_count], dtype=np.int64))[0])
            if window not in self.quarantined:
                return window
            position += 1

    def _permutation(self, epoch: int, purpose: str) -> Permutation:
        return Permutation(size=self.window_count, key=f"{purpose}/{self.seed}/{epoch}")
