"""The fixtures of `tests.commands` and `tests.fabricated_run`."""

from tests.commands import cairn, cairn_process
from tests.fabricated_run import bard, fresh, store

__all__ = ["bard", "cairn", "cairn_process", "fresh", "store"]
