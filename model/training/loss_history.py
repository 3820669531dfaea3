"""Has the loss exploded? A pure question about a list of losses.

Owns the rule: every one of the last `patience` losses lies more than `rise` nats above the median of the `BASELINE`
before them. One bad step is none; a plateau is none. Refuses to know what is done about it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

BASELINE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Spike:
    """Losses that left their course: how many steps ago it began, its lowest loss, and the median before it."""

    steps: int
    level: float
    baseline: float


def find_spike(losses: Sequence[float], *, patience: int, rise: float) -> Spike | None:
    """Return the spike the losses end in, or None; fewer than `BASELINE + patience` losses tell nothing."""
    if len(losses) < BASELINE + patience:
        return None
    level = min(losses[-patience:])
    baseline = median(losses[-patience - BASELINE : -patience])
    return Spike(steps=patience, level=level, baseline=baseline) if level > baseline + rise else None
