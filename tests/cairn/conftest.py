"""The fixtures of `tests.fabricated_run`."""

from tests.fabricated_run import bard, cairn, fresh, store

__all__ = ["bard", "cairn", "fresh", "store"]
