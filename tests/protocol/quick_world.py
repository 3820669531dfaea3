"""What makes thousands of cases quick, in one order and observed: no sleeping, no disk, no threads, small caches.

Owns the patches around the product that change no decision of it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import cairn.storage.logs.run_log
import cairn.storage.stores.object_store
import cairn.tasks.attempt.attempt_entries
import cairn.tasks.checkpoints.promotion
import cairn.tasks.checkpoints.retention
import cairn.tasks.evaluator.evaluation_run
from cairn.storage.logs.log_entry import EntryLog, ReadEntry
from tests.protocol.processes import present_belief, present_placement
from tests.protocol.world import Ledger
from tests.storage.builders import clock, no_sleep
from tests.storage.inline_executor import InlineExecutor

_LEDGERS: list[Ledger] = []


@contextmanager
def witnessed(ledger: Ledger) -> Iterator[None]:
    """Note every append that is answered with success in the ledger."""
    _LEDGERS.append(ledger)
    try:
        yield
    finally:
        _LEDGERS.pop()


@contextmanager
def quick_world() -> Iterator[pytest.MonkeyPatch]:
    """Nobody sleeps, nothing waits for a disk, operations come in one order, folds are cached every few entries."""
    append = EntryLog.append

    def noted(self: EntryLog, body: Any, **named: Any) -> ReadEntry | None:
        read = append(self, body, **named)
        if read is not None and _LEDGERS:
            _LEDGERS[-1].entries[f"{self.prefix} {read.entry.seq}"] = read.entry.write_id
        return read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(EntryLog.__init__, "__kwdefaults__", {"sleep": no_sleep, "clock": clock})
        patch.setattr(EntryLog, "append", noted)
        patch.setattr(cairn.storage.stores.object_store, "ThreadPoolExecutor", InlineExecutor)
        patch.setattr(cairn.storage.logs.run_log, "FOLD_EVERY_ENTRIES", 3)
        patch.setattr(cairn.tasks.evaluator.evaluation_run, "this_placement", present_placement)
        patch.setattr(cairn.tasks.checkpoints.promotion, "this_placement", present_placement)
        patch.setattr(cairn.tasks.attempt.attempt_entries, "this_placement", present_placement)
        patch.setattr(cairn.tasks.attempt.attempt_entries, "is_known_dead", present_belief)
        patch.setattr(cairn.tasks.checkpoints.retention, "is_known_dead", present_belief)
        yield patch
