"""Estimates the remaining time from the newest steps, so that a restart or a slow start is soon forgotten."""

from collections import deque

_WINDOW = 64


class TimeLeft:
    """Times of the newest steps, by a clock that the caller reads."""

    def __init__(self) -> None:
        self._done: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def add(self, step: int, now: float) -> None:
        """Record that `step` was done at `now`, in seconds; a step that is not later than the last starts again."""
        if self._done and step <= self._done[-1][0]:
            self._done.clear()
        self._done.append((step, now))

    def seconds(self, total: int) -> float | None:
        """Return how long the steps up to `total` will take; None before two steps are known."""
        if len(self._done) < 2:
            return None
        (first, began), (last, ended) = self._done[0], self._done[-1]
        return (ended - began) / (last - first) * max(total - last, 0)
