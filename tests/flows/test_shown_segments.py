"""Which segments of a run Prefect shows: a server that gets task runs too often falls behind and shows wrong states."""

import pytest

from cairn.flows.train_gpt import is_shown
from cairn.tasks.train_segment import Segment

MOST = 20
"""Groups of a segment, its commit and its evaluation: at most sixty task runs a flow run."""


def shown(total: int, every: int) -> list[int]:
    """Return the ends of the segments that are shown."""
    segments = (Segment(attempt=1, first=first, until=min(first + every, total)) for first in range(0, total, every))
    return [segment.until for segment in segments if is_shown(segment, total)]


@pytest.mark.parametrize(("total", "every"), [(60, 5), (2_000, 1), (1_000_000, 997), (100, 99), (19, 1)])
def test_at_most_twenty_segments_are_shown_the_first_and_the_last_among_them(total: int, every: int) -> None:
    ends = shown(total, every)
    assert len(ends) <= MOST and ends[0] == min(every, total) and ends[-1] == total


def test_every_segment_of_a_short_run_is_shown() -> None:
    assert shown(60, 5) == list(range(5, 61, 5))


def test_a_checkpoint_without_steps_is_shown_like_the_step_that_it_is_of() -> None:
    assert not is_shown(Segment(attempt=1, first=7, until=7), 2_000)
