"""The rows of all runs that a query needs: from packs, from folded logs, and from heartbeats for open attempts."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.queries.alias_history import list_decisions
from reports.queries.run_status import RunPhase, standing_of
from reports.queries.run_tables import LOG_TABLES, ROWS, STEP_TABLES, columns, promotion_row, schema_digest
from reports.queries.sql_rows import make_log_rows, make_step_rows, make_unreadable_row
from storage.logs.heartbeat import read_heartbeat
from storage.logs.run_log import run_prefix
from storage.logs.run_state import RunState
from storage.logs.step_log import read_step_records
from storage.stores.document import sha256
from storage.stores.object_store import ObjectStore
from storage.tables.table_cache import FreshTable, GatheredTables, TableCache, TableKind
from storage.tables.table_index import RunStamp

_READERS = 32
_NEEDS = {"promotions": ("promotions", "runs"), "hosts": ("training_attempts",)}
_WITH_OPEN_ATTEMPTS = {"runs", "training_attempts"}
_DYNAMIC_TABLE = re.compile(r"\bquery(_table)?\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAttempt:
    """An attempt that has not ended: its progress by its heartbeat, and the state of its run."""

    run_id: str
    attempt: int
    state: str
    step: int
    tokens: int
    gpu_seconds: float
    starting_seconds: float | None
    peak_flops: float | None
    peak_source: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class QueriedRuns:
    """The rows of the tables that a query needs: in files, in memory, and what open attempts add to them."""

    gathered: tuple[GatheredTables, ...]
    fresh: tuple[FreshTable, ...]
    open_attempts: tuple[OpenAttempt, ...]
    unreadable: tuple[str, ...]


def find_tables(sql: str) -> frozenset[str]:
    """Return the tables whose names occur in the query, and the tables these need; at least those that it reads."""
    text = sql.lower()
    if _DYNAMIC_TABLE.search(text):
        return frozenset(ROWS)
    named = [table for table in ROWS if re.search(rf"\b{table}\b", text)]
    return frozenset(needed for table in named for needed in _NEEDS.get(table, (table,)))


def gather_runs(store: ObjectStore, tables: frozenset[str], *, work: Path) -> QueriedRuns:
    """Return the rows of these tables over all runs of the store; `work` is this machine's folder."""
    run_ids = [key.split("/")[1] for key in store.folders("runs")] if tables else []
    cache = TableCache(store, (work / "tables" / sha256(store.url.encode())[:32]).absolute())
    gathered = [
        cache.gather(kind, run_ids, sorted(tables & set(kind.tables)))
        for kind in _kinds(store)
        if tables & set(kind.tables)
    ]
    unreadable = {run.run_id: run.why for found in gathered for run in found.unreadable}
    logs = [found for found in gathered if tables & _WITH_OPEN_ATTEMPTS][:1]
    return QueriedRuns(
        gathered=tuple(gathered),
        fresh=_fresh(store, tables, unreadable),
        open_attempts=_open_attempts(store, logs[0].stamps) if logs else (),
        unreadable=tuple(why for _, why in sorted(unreadable.items())),
    )


def _kinds(store: ObjectStore) -> tuple[TableKind, ...]:
    def of_log(run_id: str, state: RunState) -> dict[str, list[Any]]:
        return make_log_rows(run_id, state, RunPhase.RUNNING if state.open_attempt else standing_of(state))

    def of_steps(run_id: str, state: RunState) -> dict[str, list[Any]]:
        return {"steps": make_step_rows(run_id, state, read_step_records(store, run_prefix(run_id)))}

    log, steps = ({table: columns(table) for table in tables} for tables in (LOG_TABLES, STEP_TABLES))
    return (
        TableKind(name="log", version=schema_digest(), tables=log, make=of_log),
        TableKind(name="steps", version=schema_digest(), tables=steps, make=of_steps, with_steps=True),
    )


def _fresh(store: ObjectStore, tables: frozenset[str], unreadable: dict[str, str]) -> tuple[FreshTable, ...]:
    rows: dict[str, list[Any]] = {}
    if "runs" in tables and unreadable:
        rows["runs"] = [make_unreadable_row(run_id, why) for run_id, why in sorted(unreadable.items())]
    if "promotions" in tables and (decisions := list_decisions(store)):
        rows["promotions"] = [promotion_row(decision) for decision in decisions]
    if not rows:
        return ()
    from storage.tables.table_pack import arrow_table

    return tuple(FreshTable(table=table, rows=arrow_table(columns(table), listed)) for table, listed in rows.items())


def _open_attempts(store: ObjectStore, stamps: Sequence[RunStamp]) -> tuple[OpenAttempt, ...]:
    owned = [stamp for stamp in stamps if stamp.owner is not None]
    if not owned:
        return ()
    with ThreadPoolExecutor(_READERS) as readers:
        return tuple(readers.map(lambda stamp: _open_attempt(store, stamp), owned))


def _open_attempt(store: ObjectStore, stamp: RunStamp) -> OpenAttempt:
    from tasks.machine.placement import is_known_dead  # only open attempts pay for it

    beat = read_heartbeat(store, run_prefix(stamp.run_id), stamp.latest_attempt)
    return OpenAttempt(
        run_id=stamp.run_id,
        attempt=stamp.latest_attempt,
        state=RunPhase.INTERRUPTED if stamp.owner and is_known_dead(stamp.owner) else RunPhase.RUNNING,
        step=beat.step if beat else 0,
        tokens=beat.tokens if beat else 0,
        gpu_seconds=beat.gpu_seconds if beat else 0.0,
        starting_seconds=beat.starting_seconds if beat else None,
        peak_flops=beat.peak.flops if beat and beat.peak else None,
        peak_source=beat.peak.source if beat and beat.peak else None,
    )
