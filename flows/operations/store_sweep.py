"""Retention over all runs of a store, in bounded time: each run is swept by its own policy, its error is its row.

Owns the order (from a random run on, round and round, so that a sweep that is always cut short reaches every run in
the end) and the bound: after it no further run is begun. Refuses to know the orchestrator, and what a sweep may delete:
that is proved from each run's log, beside a trainer too.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from random import Random

from flows.operations.run_sweep import sweep_one
from storage.checkpoints.sweep import SweepAction
from storage.logs.run_log import list_run_ids
from storage.stores.object_store import ObjectStore

SWEPT, FAILED, NEXT_TIME = "swept", "failed", "next time"
_SWEEPERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSweepRow:
    """What became of one run: `superseded` checkpoints, `freed_bytes`, or why it was not swept."""

    run_id: str
    action: str
    superseded: int = 0
    freed_bytes: int = 0
    why: str = ""


def sweep_store(
    store: ObjectStore, *, dry_run: bool, most_seconds: float, random: Random, monotonic: Callable[[], float]
) -> tuple[StoreSweepRow, ...]:
    """Sweep the runs of the store, a few at a time; returns a row for each, in the order of their ids.

    Raises `StorageError` where the store does not even list its runs.
    """
    run_ids = list_run_ids(store)
    one = partial(_swept, store, dry_run=dry_run, until=monotonic() + most_seconds, monotonic=monotonic)
    with ThreadPoolExecutor(_SWEEPERS) as sweepers:
        return tuple(sorted(sweepers.map(one, _from_anywhere(run_ids, random)), key=lambda row: row.run_id))


def _from_anywhere(run_ids: Sequence[str], random: Random) -> list[str]:
    start = random.randrange(len(run_ids)) if run_ids else 0
    return [*run_ids[start:], *run_ids[:start]]


def _swept(
    store: ObjectStore, run_id: str, *, dry_run: bool, until: float, monotonic: Callable[[], float]
) -> StoreSweepRow:
    if monotonic() >= until:
        return StoreSweepRow(run_id=run_id, action=NEXT_TIME, why="the time for this sweep was over")
    try:
        report = sweep_one(store, run_id, dry_run=dry_run)
    except Exception as error:  # whatever is wrong with one run, the others are swept
        return StoreSweepRow(run_id=run_id, action=FAILED, why=f"{error}" or type(error).__name__)
    superseded = sum(item.action == SweepAction.SUPERSEDE for item in report.items)
    return StoreSweepRow(run_id=run_id, action=SWEPT, superseded=superseded, freed_bytes=report.freed_bytes)
