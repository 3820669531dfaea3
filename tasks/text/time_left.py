"""How long what is left takes, by how fast it went lately; and how such a time is written on one line.

Owns the estimate: by the newest steps, so that a restart, a slow start or another machine's speed is soon forgotten.
Pure: the clock's values are given.
"""

from collections import deque

_WINDOW = 64


class TimeLeft:
    """Remembers when the newest steps were done."""

    def __init__(self) -> None:
        """Start without any."""
        self._done: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def add(self, step: int, now: float) -> None:
        """Note that `step` is done at `now`, in seconds; an earlier step than the last begins anew."""
        if self._done and step <= self._done[-1][0]:
            self._done.clear()
        self._done.append((step, now))

    def seconds(self, total: int) -> float | None:
        """Return how long the steps up to `total` will take, None before there are two to go by."""
        if len(self._done) < 2:
            return None
        (first, began), (last, ended) = self._done[0], self._done[-1]
        return (ended - began) / (last - first) * max(total - last, 0)


def clock_time(seconds: float | None) -> str:
    """Return `0:40`, `12:05`, `3:00:09`, or a dash where nothing is known."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def bar(share: float, cells: int) -> str:
    """Return a bar of so many cells, filled to a share between 0 and 1."""
    filled = int(min(max(share, 0.0), 1.0) * cells)
    return "━" * filled + "─" * (cells - filled)
