"""How fast a run with a very long log opens, and what its cached fold costs its writer.

Writes the log of a run that commits, evaluates, supersedes and deletes, with 100 attempts and `--entries` entries, as
its writers would, with the cached fold at every 128th. Only the newest entries are kept as files: a reader with a cache
asks for no other. Then a new `RunLog` refreshes `--repeat` times. `--all` keeps every entry and also opens without the
cache. `python -m tests.programs.benchmarks.bench_history`
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cairn.storage.logs.log_entry import FORMAT_VERSION, Entry, EntryLog, ReadEntry, entry_name
from cairn.storage.logs.run_entries import RUN_KINDS, CheckpointCommitted, CheckpointDeleted, CheckpointSuperseded
from cairn.storage.logs.run_log import FOLD_EVERY_ENTRIES, RunLog, fold
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.codec import encode, sha256
from cairn.storage.stores.local_store import LocalStore
from tests.entries import NOON, ended, evaluated, opened, started, writer

RUN, KEPT, ATTEMPTS = "long", 3, 100
KIND_OF = {record: kind for kind, record in RUN_KINDS.items()}


def bodies(entries: int) -> Iterator[tuple[Any, int | None]]:
    """Yield bodies and their attempts: four entries for every commit."""
    yield opened(RUN), None
    commits = list[CheckpointCommitted]()
    attempt, every = 0, max(entries // 4 // ATTEMPTS, 1)
    for number in range(entries // 4):
        if number % every == 0:
            if attempt:
                yield ended(attempt, "preempted"), attempt
            attempt += 1
            yield started(attempt), None
        commits.append(committed(number + 1, attempt))
        yield commits[-1], attempt
        yield evaluated(number + 1, 9.0), None
        if number >= KEPT:
            old = asdict(commits.pop(0).reference)
            yield CheckpointSuperseded(**old, why="older than the newest 3"), None
            yield CheckpointDeleted(**old, bytes=17), None


def committed(step: int, attempt: int) -> CheckpointCommitted:
    """Return a commit, every field as long as in a real run."""
    return CheckpointCommitted(
        step=step,
        attempt=attempt,
        prefix=f"runs/{RUN}/checkpoints/step-{step:08d}-attempt-{attempt:04d}",
        manifest_sha256=f"{step:064x}",
        state_sha256=f"{step:064x}",
        bytes=123_456_789,
        tokens=step * 4096,
        gpu_seconds=step * 1.25,
    )


def write_log(store: LocalStore, entries: int, *, keep_all: bool) -> dict[str, float]:
    """Fold and write; returns seconds of folding and of writing the cache."""
    log = EntryLog(store=store, prefix=f"runs/{RUN}/log", kinds=RUN_KINDS)
    cache, state, prev = RunLog(store, RUN), RunState(), None
    folder = store.local_path(log.prefix)
    assert folder is not None
    folder.mkdir(parents=True)
    spent = {"fold": 0.0, "cache": 0.0}
    for seq, (body, attempt) in enumerate(bodies(entries)):
        entry = Entry(
            version=FORMAT_VERSION, seq=seq, kind=KIND_OF[type(body)], at=NOON, write_id=f"{seq:032x}", prev=prev,
            writer=writer(attempt), resume=(), body=body,
        )  # fmt: skip
        began = time.perf_counter()
        state = fold([entry], state)
        spent["fold"] += time.perf_counter() - began
        data = encode(entry := replace(entry, resume=state.resume))
        prev = sha256(data)
        if keep_all or seq > entries - 4 * FOLD_EVERY_ENTRIES:
            (folder / entry_name(seq)).write_bytes(data)
        if seq and seq % FOLD_EVERY_ENTRIES == 0:
            began = time.perf_counter()
            cache.write_fold(ReadEntry(entry=entry, sha256=prev), state)
            spent["cache"] += time.perf_counter() - began
    assert len(state.refused) == 0
    return {"entries": seq + 1, **spent}


def refresh(store: LocalStore) -> tuple[float, RunState]:
    """Return the seconds in which a new reader knows the state."""
    began = time.perf_counter()
    state = RunLog(store, RUN).refresh()
    return time.perf_counter() - began, state


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--all", action="store_true", help="keep every entry as a file, and open without the cache")
    options = parser.parse_args()
    os.fsync = lambda descriptor: None  # what is measured is not the disk
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder) / "store")
        made = write_log(store, options.entries, keep_all=options.all)
        print(
            f"{made['entries']:,.0f} entries: folding {made['fold'] / made['entries'] * 1e6:.0f} us an entry, "
            f"the cache {made['cache'] / made['entries'] * 1e6:.0f} us an entry"
        )
        head = (store.size(f"runs/{RUN}/fold.json") or 0) / 1e6
        parts = len(store.keys(f"runs/{RUN}/fold"))
        times = [refresh(store)[0] for _ in range(options.repeat)]
        print(f"head of {head:.2f} MB and {parts:,} parts; refresh {statistics.median(times) * 1e3:.0f} ms (median)")
        state = refresh(store)[1]
        began = time.perf_counter()
        print(
            f"{len(state.checkpoints):,} checkpoints and {len(list(state.evaluations)):,} evaluations are told ", end=""
        )
        print(f"in {time.perf_counter() - began:.1f} s")
        if options.all:
            store.delete(f"runs/{RUN}/fold.json")
            print(f"without the cache: {refresh(store)[0]:.1f} s")


if __name__ == "__main__":
    main()
