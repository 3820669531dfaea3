"""Several sources in one stream of draws: which component each draw belongs to, and which of its own draws it is.

Owns the schedule and the cut of a token stream into components. Refuses to know what a component's draws yield.
The schedule is a chain of Bresenham lines (Bresenham 1965, "Algorithm for computer control of a digital plotter"): each
component takes its share of what the ones before it left. So the draws of each are known for any draw number without
replaying, are exactly its share after every whole period, and never stray from it by more than half a draw for each
component.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.configuration.data import draw_shares, require_short_period
from model.errors import InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """Windows [first_window, first_window + window_count) of one source; `weight` is relative to the others'."""

    first_window: int
    window_count: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a component that nothing could be drawn from."""
        if self.first_window < 0:
            raise InvalidInput(f"first_window={self.first_window} must not be negative")
        if self.window_count < 1:
            raise InvalidInput(f"window_count={self.window_count} must be at least 1")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InvalidInput(f"weight={self.weight} must be a finite number above 0; leave the source out instead")

    @property
    def end_window(self) -> int:
        """One past the last window."""
        return self.first_window + self.window_count


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """The schedule of components with these relative weights; equal weights give equal schedules everywhere.

    A weight counts as the decimal number it is written as: 0.1 is one tenth.
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse weights whose schedule repeats too late to be computed in 64 bits."""
        require_short_period(self.weights)

    @property
    def shares(self) -> tuple[int, ...]:
        """Draws of each component in one period."""
        return draw_shares(self.weights)

    @property
    def period(self) -> int:
        """Draws after which every component has had exactly its share."""
        return sum(self.shares)

    def split(self, draws: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for draws (N,), 0-based, the component (N,) of each and its number (N,) among that one's own draws."""
        shares = self.shares
        chosen = np.full_like(draws, len(shares) - 1)
        own = draws.copy()
        left = np.arange(len(draws))  # the places no component has taken yet
        for component, share in enumerate(shares[:-1]):
            total = sum(shares[component:])
            before, after = _line(own[left], share, total), _line(own[left] + 1, share, total)
            taken = after > before
            chosen[left[taken]] = component
            own[left] = np.where(taken, before, own[left] - before)
            left = left[~taken]
        return chosen, own

    def counts(self, draws: int) -> tuple[int, ...]:
        """Return how many of the first `draws` draws each component has."""
        shares, remaining, counts = self.shares, draws, []
        for component, share in enumerate(shares):
            total = sum(shares[component:])
            counts.append((2 * remaining * share + total) // (2 * total) if share < total else remaining)
            remaining -= counts[-1]
        return tuple(counts)


def components_of(token_counts: Sequence[int], weights: Sequence[float], block_size: int) -> tuple[Component, ...]:
    """Cut a stream whose sources lie one after another, `token_counts` (S,) each, into components of whole windows.

    Windows are those of TokenWindows. One that crosses a border belongs to nobody, so a border costs less than two
    windows; a single source keeps them all. Raises InvalidInput for a source that holds no whole window.
    """
    if len(token_counts) != len(weights):
        raise InvalidInput(f"{len(weights)} weights must be as many as the {len(token_counts)} sources")
    components, start = [], 0
    for number, (tokens, weight) in enumerate(zip(token_counts, weights, strict=True)):
        first, count = whole_windows(start, tokens, block_size)
        if count < 1:
            raise InvalidInput(
                f"source {number} has {tokens} tokens, too few for a window of block_size={block_size} of its own; "
                "lower model.block_size, or leave the source out"
            )
        components.append(Component(first_window=first, window_count=count, weight=weight))
        start += tokens
    return tuple(components)


def whole_windows(start: int, tokens: int, block_size: int) -> tuple[int, int]:
    """Return the first window, and how many there are, whose tokens all lie in [start, start + tokens) of a stream."""
    first = -(-start // block_size)
    return first, max(0, (start + tokens - 1) // block_size - first)


def _line(draws: NDArray[np.int64], share: int, total: int) -> NDArray[np.int64]:
    """Return round(draws * share / total), halves up; whole periods are split off so that nothing overflows."""
    periods, rest = np.divmod(draws, total)
    line: NDArray[np.int64] = periods * share + (2 * rest * share + total) // (2 * total)
    return line
