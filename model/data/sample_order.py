"""The windows that each step trains on, as a pure function of the step: there is no loader state to save."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model.data.permutation import Permutation
from model.data.source_mixture import Component, Mixture
from model.errors import InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The order of samples of a run; equal fields give equal batches on every machine.

    Each draw belongs to one of the `components` (by default one, of all windows), in proportion to their weights. Every
    epoch of a component is a fresh permutation of its windows. The draw of a quarantined window yields another window
    of its component instead; no other draw changes.
    """

    window_count: int
    seed: int
    global_batch: int
    quarantined: frozenset[int] = field(default_factory=frozenset)
    components: tuple[Component, ...] = ()

    def __post_init__(self) -> None:
        for name in ("window_count", "global_batch"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name}={getattr(self, name)} must be at least 1")
        if not self.components:
            object.__setattr__(self, "components", (Component(first_window=0, window_count=self.window_count),))
        outside = [window for window in self.quarantined if not 0 <= window < self.window_count]
        if outside:
            raise InvalidInput(f"quarantined={min(outside)} must be a window in [0, {self.window_count})")
        self._check_components()

    def cursor_of(self, step: int) -> int:
        """Return the number of samples drawn when `step` steps are complete."""
        if step < 0:
            raise InvalidInput(f"step={step} must not be negative")
        return step * self.global_batch

    def windows_of(self, step: int) -> NDArray[np.int64]:
        """Return the windows (global_batch,) of the batch drawn when `step` steps are complete."""
        row: NDArray[np.int64] = self.windows_between(step, step + 1)[0]
        return row

    def windows_between(self, step: int, end_step: int) -> NDArray[np.int64]:
        """Return the batches (end_step - step, global_batch) of the steps from `step` on, cheaper than one by one."""
        draws = np.arange(self.cursor_of(step), self.cursor_of(end_step), dtype=np.int64)
        chosen, own = self._mixture().split(draws)
        windows = np.empty_like(draws)
        for number in np.unique(chosen).tolist():
            windows[chosen == number] = self._windows_of_component(number, own[chosen == number])
        return windows.reshape(end_step - step, self.global_batch)

    def _windows_of_component(self, number: int, own_draws: NDArray[np.int64]) -> NDArray[np.int64]:
        component = self.components[number]
        epochs, positions = np.divmod(own_draws, component.window_count)
        windows = np.empty_like(own_draws)
        for epoch in np.unique(epochs).tolist():
            drawn = self._permutation(number, epoch, "draw").permute(positions[epochs == epoch])
            windows[epochs == epoch] = drawn + component.first_window
        for index in self._quarantined_among(windows):
            windows[index] = self._replacement(number, int(epochs[index]), int(positions[index]))
        return windows

    def _quarantined_among(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.quarantined:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(np.isin(windows, np.fromiter(self.quarantined, dtype=np.int64)))

    def _replacement(self, number: int, epoch: int, position: int) -> int:
        component, spare = self.components[number], self._permutation(number, epoch, "replacement")
        while True:
            place = np.array([position % component.window_count], dtype=np.int64)
            window = component.first_window + int(spare.permute(place)[0])
            if window not in self.quarantined:
                return window
            position += 1

    def _permutation(self, number: int, epoch: int, purpose: str) -> Permutation:
        # The first component's key has no number, so an order without components equals an order of one component.
        key = f"{purpose}/{self.seed}/{epoch}" + (f"/{number}" if number else "")
        return Permutation(size=self.components[number].window_count, key=key)

    def _mixture(self) -> Mixture:
        return Mixture(weights=tuple(component.weight for component in self.components))

    def _check_components(self) -> None:
        self._mixture()
        end = 0
        for component in sorted(self.components, key=lambda part: part.first_window):
            span = f"[{component.first_window}, {component.end_window})"
            if component.first_window < end or component.end_window > self.window_count:
                raise InvalidInput(f"component {span} must lie in [0, {self.window_count}) and overlap no other")
            end = component.end_window
            bad = sum(component.first_window <= window < component.end_window for window in self.quarantined)
            if bad == component.window_count:
                raise InvalidInput(f"quarantined holds all {bad} windows of {span}; at least one must be left to train")
