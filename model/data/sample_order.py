"""The windows that each step trains on, as a pure function of the step: there is no loader state to save.

Several sources are mixed by weight, by a chain of Bresenham lines: each component takes its share of the draws the ones
before it left. That is exact after every period, and off by at most half a draw for each component in between.
Sources: Bresenham 1965; Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains" (cycle walking); Luby and
Rackoff 1988 (Feistel); Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators" (mixing).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cairn.model.configuration.data import NOTHING_BEFORE, TrainedBefore, draw_shares, require_short_period
from cairn.model.data.token_windows import first_tokens
from cairn.model.errors import InvalidInput

ROUNDS = 8


def permute(positions: NDArray[np.int64], *, size: int, key: str) -> NDArray[np.int64]:
    """Map positions (N,) in [0, size) one to one to values (N,) in [0, size), by a key and equally everywhere.

    By a Feistel network over an even power of two, with cycle walking.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    digest = hashlib.shake_256(f"{key}/{size}".encode()).digest(8 * ROUNDS)
    values, outside = positions.astype(np.uint64), np.ones(positions.shape, dtype=np.bool_)
    while outside.any():
        left, right = values[outside] >> shift, values[outside] & mask
        for round_key in np.frombuffer(digest, dtype="<u8").astype(np.uint64):
            mixed = right + round_key
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
        values[outside] = (left << shift) | right
        outside = values >= size
    return values.astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """Windows [first_window, first_window + window_count) of one source.

    `weight` is relative to the others', and `later_weights` in each stage of the order.
    """

    first_window: int
    window_count: int
    weight: float = 1.0
    later_weights: tuple[float, ...] = ()

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


def count_draws(shares: Sequence[int], draws: int) -> tuple[int, ...]:
    """Return how many of the first `draws` draws belong to each component."""
    counts, left = list[int](), draws
    for component, share in enumerate(shares[:-1]):
        counts.append(int(_bresenham(np.array([left], dtype=np.int64), share, sum(shares[component:]))[0]))
        left -= counts[-1]
    return (*counts, left)


def window_range(start: int, tokens: int, block_size: int) -> tuple[int, int]:
    """Return the first window and the number of windows whose tokens all lie in [start, start + tokens)."""
    first = -(-start // block_size)
    return first, max(0, (start + tokens - 1) // block_size - first)


def _bresenham(draws: NDArray[np.int64], share: int, total: int) -> NDArray[np.int64]:
    """Return round(draws * share / total), halves up; whole periods are split off to avoid overflow."""
    total = max(1, total)  # nothing is left to draw where all later shares are 0
    periods, rest = np.divmod(draws, total)
    line: NDArray[np.int64] = periods * share + (2 * rest * share + total) // (2 * total)
    return line


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The order of samples of a run; equal fields give equal batches on every machine.

    Each draw belongs to one of the `components` (by default one, of all windows), in proportion to their weights. Every
    epoch of a component is a fresh permutation of its windows; from the second on they begin some tokens later, another
    number in each of `block_size` epochs, all but a component's last window, which has no room. With the default of 1
    they never do. The draw of a window that shares inputs with a quarantined one yields another window of the first
    epoch's, of the same component; no other draw changes. A fork goes on where the runs `before` it have stopped, in
    each component, with another batch or other weights too; so does each of the `stages`, from its step on.
    """

    window_count: int
    seed: int
    global_batch: int
    block_size: int = 1
    quarantined: frozenset[int] = field(default_factory=frozenset)
    components: tuple[Component, ...] = ()
    before: TrainedBefore = NOTHING_BEFORE
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.components:
            object.__setattr__(self, "components", (Component(first_window=0, window_count=self.window_count),))
        if len(drawn := self.before.component_draws) not in (0, len(self.components)):
            rule = f"must be one number for each of {len(self.components)} components"
            raise InvalidInput(f"component_draws={drawn} {rule}")
        end = self.window_count * self.block_size
        outside = [window for window in self.quarantined if not 0 <= window < end]
        if outside:
            raise InvalidInput(f"quarantined={min(outside)} must be a window in [0, {end})")
        for stage in range(len(self.stages) + 1):
            require_short_period(self._weights(stage))
        # Components that overlap are refused, and one of which nothing is left to draw.
        starts = self._first_tokens(np.fromiter(self.quarantined, dtype=np.int64))
        unusable = {slot for at in starts.tolist() for slot in (at // self.block_size, -(-at // self.block_size))}
        taken = 0
        for component in sorted(self.components, key=lambda part: part.first_window):
            span = f"[{component.first_window}, {component.end_window})"
            if component.first_window < taken or component.end_window > self.window_count:
                raise InvalidInput(f"component {span} must lie in [0, {self.window_count}) and overlap no other")
            taken = component.end_window
            bad = sum(component.first_window <= window < component.end_window for window in unusable)
            if bad == component.window_count:
                raise InvalidInput(f"quarantined holds all {bad} windows of {span}; at least one must be left to train")

    def windows_of(self, step: int) -> NDArray[np.int64]:
        """Return the windows (global_batch,) of the batch drawn when `step` steps are complete."""
        row: NDArray[np.int64] = self.windows_between(step, step + 1)[0]
        return row

    def windows_between(self, step: int, end_step: int) -> NDArray[np.int64]:
        """Return the batches (end_step - step, global_batch) of the steps from `step` on, cheaper than one by one."""
        borders, parts = (step, *(begin for begin in self.stages if step < begin < end_step), end_step), []
        for first, end in pairwise(borders):
            draws = np.arange(self.draws_before(first), self.draws_before(end), dtype=np.int64)
            shares, ahead = self._mix(first)
            chosen, own = split_draws(shares, draws)
            own += ahead[chosen]
            for number in np.unique(chosen).tolist():
                draws[chosen == number] = self._windows_of_component(number, own[chosen == number])
            parts.append(draws)
        return np.concatenate(parts).reshape(end_step - step, self.global_batch)

    def draws_before(self, step: int) -> int:
        """Return how many samples of this data are drawn when `step` steps are complete."""
        return sum(self.before.component_draws) + (step - self.before.step) * self.global_batch

    def component_draws_before(self, step: int) -> tuple[int, ...]:
        """Return how many of them belong to each component."""
        shares, ahead = self._mix(step)
        return tuple((ahead + count_draws(shares, self.draws_before(step))).tolist())

    def _weights(self, stage: int) -> list[float]:
        return [(component.weight, *component.later_weights)[stage] for component in self.components]

    def _mix(self, step: int) -> tuple[Sequence[int], NDArray[np.int64]]:
        """Return the shares in a step's stage, and how many more draws of each component (C,) lie before than by them.

        The stage's first step, and a fork's, begin with what was drawn under other weights.
        """
        shares = draw_shares(self._weights(0))
        drawn = np.array(self.before.component_draws or [0] * len(self.components), dtype=np.int64)
        ahead = drawn - count_draws(shares, int(drawn.sum()))
        for stage, begin in enumerate(self.stages, start=1):
            if begin > step:
                break
            draws = self.draws_before(max(begin, self.before.step))
            drawn = ahead + count_draws(shares, draws)
            shares = draw_shares(self._weights(stage))
            ahead = drawn - count_draws(shares, draws)
        return shares, ahead

    def _windows_of_component(self, number: int, own_draws: NDArray[np.int64]) -> NDArray[np.int64]:
        component = self.components[number]
        epochs, positions = np.divmod(own_draws, component.window_count)
        windows = np.empty_like(own_draws)
        for epoch in np.unique(epochs).tolist():
            drawn = component.first_window + self._permute(positions[epochs == epoch], number, epoch, "draw")
            # An epoch's windows begin later by 0 tokens in the first, and by each number once in block_size epochs.
            asked = np.array([0, epoch % self.block_size], dtype=np.int64)
            first, own = self._permute(asked, number, 0, "shift", size=self.block_size).tolist()
            drawn[drawn < component.end_window - 1] += self.window_count * (int(own - first) % self.block_size)
            windows[epochs == epoch] = drawn
        for index in np.flatnonzero(self._is_unusable(windows)):
            place, epoch = positions[index : index + 1], int(epochs[index])
            while self._is_unusable(windows[index : index + 1])[0]:
                spare = self._permute(place % component.window_count, number, epoch, "replacement")
                windows[index : index + 1] = component.first_window + spare
                place = place + 1
        return windows

    def _is_unusable(self, windows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each window (N,) shares an input with a quarantined one."""
        if not self.quarantined:
            return np.zeros(windows.shape, dtype=np.bool_)
        bad = np.sort(self._first_tokens(np.fromiter(self.quarantined, dtype=np.int64)))
        starts = self._first_tokens(windows)
        after = np.searchsorted(bad, starts)
        gaps = [np.abs(bad[np.clip(after + side, 0, len(bad) - 1)] - starts) for side in (-1, 0)]
        unusable: NDArray[np.bool_] = np.minimum(*gaps) < self.block_size
        return unusable

    def _first_tokens(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        return first_tokens(windows, window_count=self.window_count, block_size=self.block_size)

    def _permute(
        self, positions: NDArray[np.int64], number: int, epoch: int, purpose: str, *, size: int | None = None
    ) -> NDArray[np.int64]:
        # The first component's key has no number, so an order without components equals an order of one component.
        key = f"{purpose}/{self.seed}/{epoch}" + (f"/{number}" if number else "")
        return permute(positions, size=size or self.components[number].window_count, key=key)
