"""How fast all runs of a store answer, beside DuckDB on the same rows as plain Parquet.

Makes a store of `--runs` runs with `--attempts` attempts each, as such a store looks to a reader: of every log the
newest entry, and rows that were packed before.
Asked as a user asks, by a new process each time, and within one process. Medians of `--repeat`, of wall seconds and of
processor seconds, which say more where the machine has other work. `python tests/programs/benchmarks/bench_sql.py`
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from cairn.reports.queries.run_query import answer_query
from cairn.reports.queries.run_status import RunPhase
from cairn.reports.queries.run_tables import LOG_TABLES, columns, make_log_rows, schema_digest
from cairn.storage.logs.fold_cache import History
from cairn.storage.logs.log_entry import FORMAT_VERSION, Entry, ReadEntry, Writer, entry_name
from cairn.storage.logs.run_entries import CheckpointCommitted, Decision
from cairn.storage.logs.run_state import AttemptRecord, CheckpointRecord, RunState
from cairn.storage.stores.codec import encode, sha256
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.tables.table_cache import RunStamp, TableKind, arrow_table, stamp_run, write_pack
from tests import entries

CONTRACT = """select termination_reason, count(*) as attempts, sum(gpu_seconds) / 3600 as gpu_hours
from training_attempts
where model_family = 'gpt2-tiny' and started_at >= now() - interval '7 days'
group by termination_reason order by gpu_hours desc"""
QUERIES = {
    "the query of CONTRACT": CONTRACT,
    "waste by host and reason": """select placement_host, termination_reason, sum(wasted_gpu_seconds) as wasted
        from training_attempts group by all order by wasted desc limit 10""",
    "attempts of one run": "select * from training_attempts where run_id = 'run-0007' order by attempt",
    "one row a run": "select run_id, state, attempts, gpu_seconds, lr from runs order by gpu_seconds desc limit 10",
}
REASONS = ("preempted",) * 90 + ("lost",) * 6 + ("oom", "storage", "diverged", "hung")
CONFIG = {
    "model_family": "gpt2-tiny",
    "data": {"sources": ["s3://corpus/*.jsonl.zst"], "tokenizer": "bpe:32768", "val_fraction": 0.01},
    "model": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "dropout": 0.0, "bias": False},
    "training": {"steps": 600_000, "global_batch": 512, "lr": 6e-4, "min_lr": 6e-5, "precision": "bf16", "seed": 1},
    "checkpoint": {"every_steps": 500, "keep_last": 3, "keep_best": 1, "keep_every": 0},
    "budgets": {reason: {"retries": 9, "total": None, "backoff_seconds": 5.0} for reason in sorted(set(REASONS))},
}


def fabricated(number: int, attempts: int, chance: random.Random) -> RunState:
    """Return a run that ended that many attempts, each after one commit."""
    opened_at = datetime.now(UTC) - timedelta(days=30 * chance.random(), minutes=attempts)
    config = {**CONFIG, "training": {**CONFIG["training"], "seed": number}}
    run = entries.opened(
        f"run-{number:04d}",
        model_family=chance.choice(("gpt2-tiny", "gpt2-small")),
        config=config,
        config_sha256=sha256(str(number).encode()),
        data_snapshot="d" * 64,
        total_steps=600_000,
    )
    records, checkpoints = [], []
    for attempt in range(1, attempts + 1):
        commit = _commit(run.run_id, attempt, chance)
        at = opened_at + timedelta(minutes=attempt, seconds=chance.random())
        resumed = checkpoints[-1].committed.reference if checkpoints else None
        records.append(_attempt(attempt, at, config, resumed, chance))
        checkpoints.append(CheckpointRecord(committed=commit, committed_at=at + timedelta(seconds=40), number=attempt))
    return RunState(opened=run, opened_at=opened_at, attempts=History(records), live_checkpoints=tuple(checkpoints))


def _commit(run_id: str, attempt: int, chance: random.Random) -> CheckpointCommitted:
    step = attempt * 500
    return CheckpointCommitted(
        step=step,
        attempt=attempt,
        prefix=f"runs/{run_id}/checkpoints/step-{step:08d}-attempt-{attempt:04d}",
        manifest_sha256=chance.randbytes(32).hex(),
        state_sha256=chance.randbytes(32).hex(),
        bytes=1_492_000_000,
        tokens=step * 512 * 1024,
        gpu_seconds=chance.uniform(20, 60),
    )


def _attempt(attempt: int, at: datetime, config: Any, resumed: Any, chance: random.Random) -> AttemptRecord:
    seconds, reason = chance.uniform(30, 60), chance.choice(REASONS)
    placement = entries.placement(
        host=f"gpu-{chance.randrange(200):03d}",
        boot_id=chance.randbytes(16).hex(),
        pid=chance.randrange(1, 60_000),
        start_ticks=int(at.timestamp()),
        device="cuda",
        world_size=8,
        threads=8,
    )
    started = entries.started(
        attempt,
        placement=placement,
        config=config,
        config_sha256=sha256(b"config"),
        micro_batch=8,
        resumed_from=resumed,
    )
    ended = entries.ended(
        attempt,
        reason,
        detail=f"{reason} at step {attempt * 500 + 7}",
        fingerprint=chance.randbytes(8).hex(),
        last_step=attempt * 500 + 7,
        tokens=507 * 512 * 1024,
        gpu_seconds=seconds,
        useful_gpu_seconds=seconds * 0.9,
        wasted_gpu_seconds=seconds * 0.1,
        decision=Decision(action="resume", reason="progress refills", charged=reason, left={reason: 9}),
    )
    return AttemptRecord(
        started=started,
        started_at=at,
        flow_run_id=chance.randbytes(16).hex(),
        ended=ended,
        ended_at=at + timedelta(seconds=50),
        last_committed_step=attempt * 500,
        made_progress=True,
    )


def head_of(store: LocalStore, run_id: str, state: RunState, seq: int) -> ReadEntry:
    """Write the entry the log of the run ends in, and return it."""
    entry = Entry(
        version=FORMAT_VERSION,
        seq=seq,
        kind="attempt-ended",
        at=datetime.now(UTC),
        write_id=f"{run_id}{seq}",
        prev="p" * 64,
        writer=Writer(host="here", pid=1),
        resume=state.resume,
        body=state.attempts[-1].ended,
    )
    data, path = encode(entry), store.local_path(f"runs/{run_id}/log/{entry_name(seq)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)  # as it lies there; a thousand fsyncs are not what is measured
    return ReadEntry(entry=entry, sha256=sha256(data))


def packs_of(store: LocalStore, work: Path) -> Path:
    """Return the folder of this store's packs."""
    return work / "tables" / sha256(store.url.encode())[:32] / "log"


def build_store(folder: Path, work: Path, *, runs: int, attempts: int) -> LocalStore:
    """Make the store, and its packs."""
    store, chance, made = LocalStore(folder), random.Random(1), dict[str, list[tuple[RunStamp, dict[str, pa.Table]]]]()
    kind = TableKind(name="log", version="", tables={table: columns(table) for table in LOG_TABLES}, make=make_nothing)
    for number in range(runs):
        state = fabricated(number, attempts, chance)
        run_id = f"run-{number:04d}"
        head = head_of(store, run_id, state, 3 * attempts)
        stamp = stamp_run(store, run_id, head, state, with_steps=False)
        rows = make_log_rows(run_id, state, RunPhase.INTERRUPTED)
        tables = {table: arrow_table(listed, rows[table]) for table, listed in kind.tables.items()}
        made.setdefault(kind.pack_of(run_id), []).append((stamp, tables))
    for name, members in made.items():
        (packs_of(store, work) / name).mkdir(parents=True)
        joined = {
            table: pa.concat_tables([tables[table] for _, tables in members]).unify_dictionaries()
            for table in kind.tables
        }
        write_pack(packs_of(store, work) / name, schema_digest(), joined, tuple(stamp for stamp, _ in members))
    return store


def make_nothing(run_id: str, state: RunState) -> dict[str, list[Any]]:
    """Stand for the maker of rows, which are made beforehand."""
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asker:
    """Asks in one of the ways that are compared."""

    name: str
    ask: Callable[[str], object]


def askers(store: LocalStore, work: Path) -> list[Asker]:
    """Return cairn as a command and within a process, and DuckDB alone in both ways, over the same files."""
    import duckdb

    folder = packs_of(store, work)
    of_table: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.parquet")):
        names = set(duckdb.sql(f"select * from '{path}' limit 0").columns)
        table = "training_attempts" if "ended_at" in names else "runs" if "n_layer" in names else "other"
        of_table.setdefault(table, []).append(str(path))
    views = "; ".join(f"create view {table} as from read_parquet({paths})" for table, paths in of_table.items())
    environment = {**os.environ, "CAIRN_CACHE": str(work), "CAIRN_STORE": store.url}
    bare = (
        f"import sys, duckdb; c = duckdb.connect(); c.execute({views!r}); print(len(c.execute(sys.argv[1]).fetchall()))"
    )

    def run(*command: str) -> None:
        subprocess.run([sys.executable, *command], env=environment, check=True, capture_output=True)

    def cairn_within(sql: str) -> None:
        with answer_query(store, sql, work=work) as found:
            list(found.rows)

    def duckdb_within(sql: str) -> None:
        with duckdb.connect() as base:
            base.execute(views)
            base.execute(sql).fetchall()

    return [
        Asker(name="cairn sql --json", ask=lambda sql: run("-m", "cairn.cli.command", "sql", sql, "--json")),
        Asker(name="python, DuckDB alone", ask=lambda sql: run("-c", bare, sql)),
        Asker(name="cairn, within a process", ask=cairn_within),
        Asker(name="DuckDB, within a process", ask=duckdb_within),
    ]


def median_seconds(ask: Callable[[str], object], sql: str, repeat: int) -> tuple[float, float]:
    """Return wall and processor seconds of asking, medians, after asking once for the page cache."""
    ask(sql)
    wall, processor = [], []
    for _ in range(repeat):
        before, started = os.times(), time.perf_counter()
        ask(sql)
        wall.append(time.perf_counter() - started)
        processor.append(sum(os.times()[:4]) - sum(before[:4]))
    return statistics.median(wall), statistics.median(processor)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--attempts", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        shape = {"runs": options.runs, "attempts": options.attempts}
        store = build_store(Path(folder) / "store", Path(folder) / "work", **shape)
        size = sum(path.stat().st_size for path in (Path(folder) / "work").rglob("*.parquet"))
        print(f"{shape}: packs of {size / 1e6:,.0f} MB, made in {time.perf_counter() - began:.0f} s")
        asking = askers(store, Path(folder) / "work")
        print(f"{'wall (processor) seconds':<28}" + "".join(f"{asker.name:>26}" for asker in asking))
        for name, sql in QUERIES.items():
            medians = [median_seconds(asker.ask, sql, options.repeat) for asker in asking]
            shown = [f"{wall:.2f} ({processor:.2f})" for wall, processor in medians]
            print(f"{name:<28}" + "".join(f"{text:>26}" for text in shown), flush=True)


if __name__ == "__main__":
    main()
