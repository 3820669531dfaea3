"""Counts calls instead of seconds: what a computation takes on any machine, whatever else that machine does."""

import sys
from collections.abc import Callable
from types import FrameType


def count_calls(act: Callable[[], object]) -> int:
    """Return how many Python and C functions `act` calls in this thread."""
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls
