"""Retention for one run, and for a store's in bounded time: begun at a random run, so that each gets its turn."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from cairn.reports.errors import RunNotFound
from cairn.reports.queries.run_lookup import configuration_of, find_run
from cairn.storage.checkpoints.sweep import SweepAction, SweepReport
from cairn.storage.logs.run_index import list_run_ids
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.evaluator.evaluation_run import suite_of


class SweepOutcome(StrEnum):
    """The outcome of one run in a sweep of the store."""

    SWEPT = "swept"
    FAILED = "failed"
    NEXT_TIME = "next time"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSweepRow:
    """The outcome of one run: `superseded` checkpoints, `freed_bytes`, or why it was not swept."""

    run_id: str
    action: SweepOutcome
    superseded: int = 0
    freed_bytes: int = 0
    why: str = ""


def sweep_run_by_id(store: ObjectStore, run_id: str, *, dry_run: bool) -> SweepReport:
    """Sweep a run by its newest policy; raises `RunNotFound`, or `IntegrityError` before anything is deleted."""
    log = find_run(store, run_id)
    configuration = configuration_of(log.state)
    return sweep_run(log, configuration.checkpoint, suite_of(configuration.evaluation).sha256, dry_run=dry_run)


def sweep_store(
    store: ObjectStore, *, dry_run: bool, most_seconds: float, random: Random, monotonic: Callable[[], float]
) -> tuple[StoreSweepRow, ...]:
    """Sweep runs until `most_seconds`, a few at a time; returns a row for each, by run id. Raises `StorageError`."""
    run_ids, until = list_run_ids(store), monotonic() + most_seconds
    first = random.randrange(len(run_ids)) if run_ids else 0

    def sweep_one(run_id: str) -> StoreSweepRow | None:
        if monotonic() >= until:
            return StoreSweepRow(run_id=run_id, action=SweepOutcome.NEXT_TIME, why="the time for this sweep was over")
        try:
            report = sweep_run_by_id(store, run_id, dry_run=dry_run)
        except RunNotFound:  # a fork that was never opened
            return None
        except Exception as error:  # one broken run must not keep the others from being swept
            return StoreSweepRow(run_id=run_id, action=SweepOutcome.FAILED, why=f"{error}" or type(error).__name__)
        superseded, freed = sum(item.action == SweepAction.SUPERSEDE for item in report.items), report.freed_bytes
        return StoreSweepRow(run_id=run_id, action=SweepOutcome.SWEPT, superseded=superseded, freed_bytes=freed)

    with ThreadPoolExecutor(4) as sweepers:
        rows = sweepers.map(sweep_one, run_ids[first:] + run_ids[:first])
        return tuple(sorted(filter(None, rows), key=lambda row: row.run_id))
