"""SQL over all runs of a store, answered by DuckDB in this process's memory.

While the query runs, the database can read the files of its tables and nothing else; it has no network, no extensions,
and its settings are locked (https://duckdb.org/docs/stable/operations_manual/securing_duckdb/overview).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cairn.reports.errors import InvalidQuery, ReportError
from cairn.reports.queries import alias_history, run_status, run_tables
from cairn.reports.queries.run_tables import LOG_TABLES, ROWS, columns
from cairn.storage.logs import log_entry, run_entries, run_index, run_log, run_state, step_log
from cairn.storage.stores import child_process, codec, object_store
from cairn.storage.tables import table_cache

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_NEEDS = {"promotions": ("promotions", "runs"), "hosts": ("training_attempts",)}
_WITH_OPEN_ATTEMPTS = {"runs", "training_attempts"}
_DYNAMIC_TABLE = re.compile(r"\bquery(_table)?\b")
_FETCHED_ROWS = 5_000
_TURNED_OFF = (
    *("autoinstall_known_extensions", "autoload_known_extensions", "allow_community_extensions"),
    *("allow_persistent_secrets", "python_enable_replacements"),
)
_SETTINGS: dict[str, Any] = dict.fromkeys(_TURNED_OFF, "false")
_ARITHMETIC = tuple(run_tables.plain_fields(log_entry.Arithmetic))
_LIST_TABLES = f"tables: {', '.join(ROWS)}; `cairn sql` lists their columns"


@cache
def _read_views() -> Mapping[str, str]:
    """Return the query of each view; `{rows}` in it stands for the rows of the table."""

    def struct(record: type, name: str, key: str = "") -> str:
        """Return a nested record made of the columns with its prefix; where the column of `key` is null, null."""
        pairs = ", ".join(f"'{field}': {name}_{field}" for field in run_tables.plain_fields(record))
        return f"case when {name}_{key} is not null then {{{pairs}}} end as {name}" if key else f"{{{pairs}}} as {name}"

    live = ["tokens", "gpu_seconds", "starting_seconds", "peak_flops", "peak_source"]
    live += [f"arithmetic_{name}" for name in _ARITHMETIC]
    given = {
        "peak": struct(log_entry.DevicePeak, "peak", "flops"),
        "arithmetic": struct(log_entry.Arithmetic, "arithmetic", "digest"),
        "placement": struct(run_entries.Placement, "placement"),
        "decision": struct(run_entries.Decision, "decision", "action"),
        "verdict": struct(run_entries.CurveVerdict, "verdict", "kind"),
        "live_values": ", ".join(f"coalesce(live.{name}, rows.{name}) as {name}" for name in live),
        "arithmetic_columns": ", ".join(f"arithmetic_{name} varchar" for name in _ARITHMETIC),
        "rows": "{rows}",
    }
    text = (files("cairn.reports.queries") / "views.sql").read_text(encoding="utf-8")
    _, *parts = re.split(r"^-- (\w+):$", text, flags=re.MULTILINE)
    return {name: query.strip().format_map(given) for name, query in zip(parts[::2], parts[1::2], strict=True)}


Parts: TypeAlias = "Mapping[str, Sequence[Path | pa.Table]]"
"""The rows of tables, in files and in memory."""


def find_tables(sql: str) -> frozenset[str]:
    """Return the tables whose names occur in the query, and the tables these need; at least those that it reads."""
    text = sql.lower()
    if _DYNAMIC_TABLE.search(text):
        return frozenset(ROWS)
    named = [table for table in ROWS if re.search(rf"\b{table}\b", text)]
    return frozenset(needed for table in named for needed in _NEEDS.get(table, (table,)))


def _gather_runs(
    store: object_store.ObjectStore, tables: frozenset[str], *, work: Path
) -> tuple[Parts, list[tuple[object, ...]], tuple[str, ...]]:
    """Return the rows of these tables over all runs of the store, what open attempts add, and why runs are unreadable.

    `work` is this machine's folder.
    """
    run_ids = run_index.list_folders(store) if tables else []
    cache = table_cache.TableCache(store, (work / "tables" / codec.sha256(store.url.encode())[:32]).absolute())

    def phase(state: run_state.RunState) -> run_status.RunPhase:
        return run_status.RunPhase.RUNNING if state.open_attempt else run_status.phase_of(state)

    def of_run(run_id: str, state: run_state.RunState) -> dict[str, list[Any]]:
        is_closed = state.attempts and not state.open_attempt and not state.deleted
        newest = state.attempts[-1].started if is_closed else None
        named = (run_log.run_prefix(run_id), newest.attempt, newest.claim_id) if newest else None
        last = step_log.read_last_record(store, *named) if named else None
        return {"runs": [run_tables.make_run_row(run_id, state, phase(state), last.train_loss if last else None)]}

    def of_log(run_id: str, state: run_state.RunState) -> dict[str, list[Any]]:
        return run_tables.make_log_rows(run_id, state, phase(state))

    def of_steps(run_id: str, state: run_state.RunState) -> dict[str, list[Any]]:
        records = step_log.read_step_records(store, run_log.run_prefix(run_id), state.attempts)
        return {"steps": run_tables.make_step_rows(run_id, state, records)}

    version, log = run_tables.schema_digest(), {table: columns(table) for table in LOG_TABLES if table != "runs"}
    steps = {"steps": columns("steps")}
    kinds = (  # a list of runs is asked for most often, and makes no other rows
        table_cache.TableKind(name="runs", version=version, tables={"runs": columns("runs")}, make=of_run, packs=8),
        table_cache.TableKind(name="log", version=version, tables=log, make=of_log),
        table_cache.TableKind(name="steps", version=version, tables=steps, make=of_steps, with_steps=True),
    )
    wanted = ((kind, sorted(tables & set(kind.tables))) for kind in kinds)
    gathered = [cache.gather(kind, run_ids, named) for kind, named in wanted if named]
    parts = {table: [*rows] for found in gathered for table, rows in found.parts.items()}
    unreadable = {run_id: why for found in gathered for run_id, why in found.unreadable.items()}
    fresh = {"runs": [run_tables.make_unreadable_row(run_id, why) for run_id, why in sorted(unreadable.items())]}
    if "promotions" in tables:
        fresh["promotions"] = [run_tables.promotion_row(item) for item in alias_history.list_decisions(store)]
    for table, rows in fresh.items():
        if rows and table in tables:
            parts.setdefault(table, []).append(table_cache.arrow_table(columns(table), rows))
    stamps = gathered[0].stamps if tables & _WITH_OPEN_ATTEMPTS else ()
    opened = [stamp for stamp in stamps if stamp.owner]
    open_attempts = [*object_store.ask_each(store, partial(_open_attempt, store), opened)]
    return parts, open_attempts, tuple(why for _, why in sorted(unreadable.items()))


def _open_attempt(store: object_store.ObjectStore, stamp: table_cache.RunStamp) -> tuple[object, ...]:
    """Return the progress of an attempt that has not ended, by its heartbeat, and the state of its run."""
    from cairn.tasks.machine.placement import is_known_dead  # only open attempts pay for it

    is_gone = stamp.owner is not None and is_known_dead(stamp.owner)
    phase = run_status.RunPhase.INTERRUPTED if is_gone else run_status.RunPhase.RUNNING
    prefix = run_log.run_prefix(stamp.run_id)
    beat = step_log.read_heartbeat(store, prefix, stamp.latest_attempt, stamp.claim_id)
    if beat is None:
        return (stamp.run_id, stamp.latest_attempt, phase, 0, 0, 0.0, *[None] * (6 + len(_ARITHMETIC)))
    progress = beat.step, beat.tokens, beat.gpu_seconds, beat.starting_seconds
    peak = (beat.peak.flops, beat.peak.source) if beat.peak else (None, None)
    arithmetic = [getattr(beat.arithmetic, name, None) for name in _ARITHMETIC]
    newest = beat.at, beat.train_loss, beat.tokens_per_second
    return (stamp.run_id, stamp.latest_attempt, phase, *progress, *peak, *arithmetic, *newest)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryResult:
    """An answer: its columns, its rows, fetched as they are read, and the runs that could not be read."""

    columns: tuple[table_cache.Column, ...]
    rows: Iterator[tuple[Any, ...]]
    unreadable: tuple[str, ...]


@contextmanager
def answer_query(store: object_store.ObjectStore, sql: str, *, work: Path) -> Iterator[QueryResult]:
    """Run the query over all runs; rows can be read until the context ends. `InvalidQuery` names the tables."""
    import duckdb

    parts, open_attempts, unreadable = _gather_runs(store, find_tables(sql), work=work)
    try:
        with _database(parts, open_attempts) as base:
            found = base.execute(sql)
            if found is None:
                raise InvalidQuery(f"the query is empty; {_LIST_TABLES}")
            described, names = base.description or (), list[str]()
            for name, *_ in described:  # every column of an answer has a name of its own
                number = sum(other == name or other.startswith(f"{name}_") for other in names)
                names.append(f"{name}_{number + 1}" if name in names else name)
            types = (str(kind) for _, kind, *_ in described)
            shown = (table_cache.Column(name=name, type=kind) for name, kind in zip(names, types, strict=True))
            rows = chain.from_iterable(iter(partial(base.fetchmany, _FETCHED_ROWS), []))
            yield QueryResult(columns=tuple(shown), rows=rows, unreadable=unreadable)
    except duckdb.IOException as error:
        raise ReportError(f"the tables could not be read, run the same command again: {error}") from error
    except duckdb.Error as error:
        message = " ".join(line.strip() for line in str(error).split("\n\nLINE ")[0].splitlines() if line.strip())
        raise InvalidQuery(f"{message}; {_LIST_TABLES}") from error


def describe_tables() -> list[tuple[str, str, str]]:
    """Return table, column and type of everything that can be queried; reads no run."""
    listed = "select table_name, column_name, data_type from information_schema.columns where table_schema = 'main'"
    with _database({}, []) as base:
        rows = base.execute(f"{listed} order by ordinal_position").fetchall()
    return sorted(rows, key=lambda row: list(ROWS).index(row[0]))


@contextmanager
def _database(parts: Parts, open_attempts: Sequence[tuple[object, ...]]) -> Iterator["duckdb.DuckDBPyConnection"]:
    import duckdb

    with child_process.temporary_folder("cairn-sql-") as spool, duckdb.connect(config=_SETTINGS) as base:
        base.execute(f"set temp_directory = {_literals([str(spool / 'spill')])}")
        base.execute("set TimeZone = 'UTC'")
        base.execute("create schema folded")
        base.execute(_read_views()["open_attempts"])
        for attempt in open_attempts:
            base.execute(f"insert into folded.open_attempts values ({', '.join('?' * len(attempt))})", attempt)
        for table in ROWS:
            listed = ", ".join(f'"{column.name}" {column.type}' for column in columns(table))
            base.execute(f"create table folded.{table} ({listed})")
        files: list[tuple[str, str]] = []
        for table, part in ((table, part) for table, found in parts.items() for part in found):
            if isinstance(part, Path):
                link = spool / f"{len(files)}.parquet"  # a name without glob characters
                link.symlink_to(part)
                files.append((table, str(link)))
            else:
                base.register("arriving", part)
                base.execute(f"insert into folded.{table} select * from arriving")
                base.unregister("arriving")
        base.execute(f"set allowed_paths = [{_literals(path for _, path in files)}]")
        base.execute(f"set allowed_directories = [{_literals([str(spool / 'spill')])}]")
        base.execute("set enable_external_access = false")
        for table in sorted(ROWS, key=lambda name: name in _NEEDS):  # their views read another one
            base.execute(f"create view {table} as {_view(table, files)}")
        base.execute("set lock_configuration = true")
        yield base


def _view(table: str, files: Sequence[tuple[str, str]]) -> str:
    plain = ", ".join(f'"{column.name}"' for column in columns(table))
    cast = ", ".join(f'"{c.name}"::JSON as "{c.name}"' if c.type == "JSON" else f'"{c.name}"' for c in columns(table))
    rows = f"select {plain} from folded.{table}"
    if paths := [path for name, path in files if name == table]:
        rows += f" union all select {cast} from read_parquet([{_literals(paths)}])"
    return _read_views().get(table, "{rows}").replace("{rows}", rows)


def _literals(texts: Iterable[str]) -> str:
    return ", ".join("'" + text.replace("'", "''") + "'" for text in texts)
