"""Chooses the CPU threads of a new run from measured steps. Imports no torch.

The number of threads is part of the arithmetic (a layer norm's gradient is added up in one part for each thread), so it
is chosen once and frozen. Fewer threads than cores are taken only where that is far faster: a narrow margin would let
two runs of one configuration choose differently.
"""

from collections.abc import Mapping
from dataclasses import dataclass

MAX_SLOWDOWN = 2.0
"""How many times as long as with the best number of threads a step may take; between idle cores it is at most 1.3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadChoice:
    """The threads of each trainer process of a run, and the reason in words."""

    threads: int
    why: str


def thread_candidates(cores: int) -> tuple[int, ...]:
    """Return all cores, half of them, and so on down to one."""
    halves = (cores >> level for level in range(cores.bit_length()))
    return tuple(count for count in halves if count)


def choose_threads(step_seconds: Mapping[int, float], cores: int) -> ThreadChoice:
    """Return the most threads that are not far slower than the best, by the seconds of a step; all cores if unknown."""
    if not step_seconds:
        return ThreadChoice(threads=cores, why=f"its share of the cores is {cores}, nothing was measured")
    best = min(step_seconds, key=lambda count: (step_seconds[count], -count))
    chosen = max(count for count in step_seconds if step_seconds[count] <= MAX_SLOWDOWN * step_seconds[best])
    most = max(step_seconds)
    if chosen == most:
        times = ", ".join(f"{count}: {seconds * 1e3:.3g} ms" for count, seconds in sorted(step_seconds.items()))
        why = f"no smaller number was {MAX_SLOWDOWN:g} times as fast (measured steps, {times})"
        return ThreadChoice(threads=chosen, why=why)
    slower = step_seconds[most] / step_seconds[chosen]
    return ThreadChoice(threads=chosen, why=f"a measured step took {slower:.1f} times as long with {most} threads")
