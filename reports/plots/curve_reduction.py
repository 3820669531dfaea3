"""Reduces a curve to what a plot can show, and smooths it.

Thinning keeps the first, least, greatest and last value of each pixel column (M4, Jugel et al., VLDB 2014).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
_BINS = 1200
_GREATEST = 1e30
_WINDOW_SHARE = 50


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Series:
    """Values over steps, both of one length, steps ascending."""

    steps: Column
    values: Column

    @property
    def is_finite(self) -> NDArray[np.bool_]:
        """Which values are finite and small enough to be added up and drawn."""
        return np.abs(self.values) < _GREATEST

    @property
    def finite(self) -> "Series":
        """The finite values."""
        return self.where(self.is_finite)

    def where(self, kept: NDArray[np.bool_]) -> "Series":
        """Return the values whose flag in `kept` is true."""
        return Series(steps=self.steps[kept], values=self.values[kept])


def thin_out(series: Series, *, columns: int) -> Series:
    """Return at most four finite values for each of `columns` columns of equal width, and both ends."""
    finite = series.finite
    steps, values = finite.steps, finite.values
    if len(steps) <= 4 * columns:
        return finite
    column = ((steps - steps[0]) * columns / (steps[-1] - steps[0] + 1)).astype(np.int64)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    last = np.append(first[1:], len(steps)) - 1
    by_value = np.lexsort((values, column))
    kept = np.unique(np.concatenate((first, last, by_value[first], by_value[last])))
    return Series(steps=steps[kept], values=values[kept])


def smooth(series: Series) -> Series:
    """Return the trend over a fiftieth of the line, narrower at its start: a running median, then a running mean."""
    binned = _binned(series.finite)
    half = max(1, len(binned.steps) // (2 * _WINDOW_SHARE))
    median = _running(binned.values, half, np.median)
    return Series(steps=binned.steps, values=_running(median, half, np.mean))


def _binned(series: Series) -> Series:
    if len(series.steps) <= _BINS:
        return series
    steps, values = np.array_split(series.steps, _BINS), np.array_split(series.values, _BINS)
    return Series(
        steps=np.array([np.median(part) for part in steps]), values=np.array([np.median(part) for part in values])
    )


def _running(values: Column, half: int, middle: Callable[[Column], Any]) -> Column:
    windows = (values[max(0, i - min(half, i)) : i + min(half, i) + 1] for i in range(len(values)))
    return np.array([middle(window) for window in windows], dtype=np.float64)
