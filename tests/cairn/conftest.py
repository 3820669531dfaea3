"""The fixtures of `tests.commands`, `tests.fabricated_run` and `tests.processes`."""

from tests.commands import cairn, cairn_process
from tests.fabricated_run import bard, fresh, store
from tests.processes.forked_parsers import forked_parsers

__all__ = ["bard", "cairn", "cairn_process", "forked_parsers", "fresh", "store"]
