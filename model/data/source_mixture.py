"""Mixes several sources by weight: which component each draw belongs to, computed for any draw without replay.

The schedule is a chain of Bresenham lines: each component takes its share of the draws the ones before it left. It is
exact after every period, and off by at most half a draw for each component in between.
Source: Bresenham 1965, "Algorithm for computer control of a digital plotter".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.errors import InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """Windows [first_window, first_window + window_count) of one source; `weight` is relative to the others'."""

    first_window: int
    window_count: int
    weight: float = 1.0

    def __post_init__(self) -> None:
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


def split_draws(shares: Sequence[int], draws: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the component (N,) of each 0-based draw (N,) and its number (N,) there; `shares` add up to one period."""
    chosen = np.full_like(draws, len(shares) - 1)
    own = draws.copy()
    left = np.arange(len(draws))  # indexes of draws without a component so far
    for component, share in enumerate(shares[:-1]):
        total = sum(shares[component:])
        before, after = _bresenham(own[left], share, total), _bresenham(own[left] + 1, share, total)
        taken = after > before
        chosen[left[taken]] = component
        own[left] = np.where(taken, before, own[left] - before)
        left = left[~taken]
    return chosen, own


def cut_components(token_counts: Sequence[int], weights: Sequence[float], block_size: int) -> tuple[Component, ...]:
    """Cut sources of `token_counts` (S,) into the windows wholly theirs; InvalidInput for one without a window."""
    if len(token_counts) != len(weights):
        raise InvalidInput(f"{len(weights)} weights must be as many as the {len(token_counts)} sources")
    components, start = [], 0
    for number, (tokens, weight) in enumerate(zip(token_counts, weights, strict=True)):
        first, count = window_range(start, tokens, block_size)
        if count < 1:
            raise InvalidInput(
                f"source {number} has {tokens} tokens, too few for a window of block_size={block_size} of its own; "
                "lower model.block_size, or leave the source out"
            )
        components.append(Component(first_window=first, window_count=count, weight=weight))
        start += tokens
    return tuple(components)


def window_range(start: int, tokens: int, block_size: int) -> tuple[int, int]:
    """Return the first window and the number of windows whose tokens all lie in [start, start + tokens)."""
    first = -(-start // block_size)
    return first, max(0, (start + tokens - 1) // block_size - first)


def _bresenham(draws: NDArray[np.int64], share: int, total: int) -> NDArray[np.int64]:
    """Return round(draws * share / total), halves up; whole periods are split off to avoid overflow."""
    periods, rest = np.divmod(draws, total)
    line: NDArray[np.int64] = periods * share + (2 * rest * share + total) // (2 * total)
    return line
