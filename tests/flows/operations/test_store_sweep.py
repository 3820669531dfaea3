"""Retention over all runs of a store: each by its own policy, one error is one row, the time is bounded."""

from itertools import count
from random import Random
from typing import Any

import pytest

from cairn.flows.operations.store_sweep import StoreSweepRow, SweepOutcome, sweep_store
from cairn.storage.logs.log_entry import this_writer
from cairn.storage.logs.run_entries import ForkAbandoned
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from tests.fabricated_run import fabricate

KEEP_ONE = ("checkpoint.keep_last=1", "checkpoint.keep_best=0")


def swept(store: LocalStore, **options: Any) -> dict[str, StoreSweepRow]:
    chosen = {"dry_run": False, "most_seconds": 60.0, "random": Random(1), "monotonic": lambda: 0.0, **options}
    return {row.run_id: row for row in sweep_store(store, **chosen)}


@pytest.fixture
def three(store: LocalStore) -> LocalStore:
    """A store with three runs of three commits, of which their policy keeps one."""
    for run_id in ("ann", "bea", "cy"):
        run = fabricate(store, run_id)
        run.start(overrides=KEEP_ONE)
        for step in (10, 20, 30):
            run.commit(step)
    return store


def test_every_run_is_swept_by_its_own_policy(three: LocalStore) -> None:
    generous = fabricate(three, "dan")
    generous.start()
    generous.commit(10)
    generous.commit(20)
    rows = swept(three)
    assert {run_id: row.superseded for run_id, row in rows.items()} == {"ann": 2, "bea": 2, "cy": 2, "dan": 0}
    assert all(row.action == SweepOutcome.SWEPT for row in rows.values()) and rows["ann"].freed_bytes > 0


def test_a_second_sweep_finds_nothing_to_do(three: LocalStore) -> None:
    swept(three)
    assert {(row.superseded, row.freed_bytes) for row in swept(three).values()} == {(0, 0)}


def test_what_the_open_attempt_is_staging_stays(three: LocalStore) -> None:
    staging = "runs/ann/checkpoints/step-00000040-attempt-0001/weights-00001-of-00001.safetensors"
    three.write(staging, b"half")
    swept(three)
    assert three.read(staging) == b"half"


def test_a_fork_that_was_never_opened_is_no_run(three: LocalStore) -> None:
    body = ForkAbandoned(pin_id="p", prefix="runs/ann/checkpoints/step-00000010-attempt-0001", why="it died")
    RunLog(three, "twin").append(lambda state: body, writer=this_writer())
    assert swept(three).keys() == {"ann", "bea", "cy"}


def test_a_dry_run_deletes_nothing(three: LocalStore) -> None:
    before = three.keys("runs")
    assert swept(three, dry_run=True)["bea"].superseded == 2
    assert three.keys("runs") == before


@pytest.mark.unsound_log
def test_a_run_whose_log_is_broken_costs_only_its_own_row(three: LocalStore) -> None:
    key = three.keys("runs/bea/log")[0]
    three.write(key, b"{}")
    rows = swept(three)
    assert (rows["ann"].action, rows["bea"].action, rows["cy"].action) == (
        SweepOutcome.SWEPT,
        SweepOutcome.FAILED,
        SweepOutcome.SWEPT,
    )
    assert rows["bea"].why


def test_after_its_time_no_further_run_is_begun(three: LocalStore) -> None:
    seconds = count()
    rows = swept(three, most_seconds=2.0, monotonic=lambda: float(next(seconds)))
    assert sorted(row.action for row in rows.values()) == [
        SweepOutcome.NEXT_TIME,
        SweepOutcome.NEXT_TIME,
        SweepOutcome.SWEPT,
    ]


def test_sweeps_that_are_always_cut_short_reach_every_run(three: LocalStore) -> None:
    reached = set[str]()
    for seed in range(20):
        seconds = count()
        rows = swept(
            three, most_seconds=2.0, random=Random(seed), monotonic=lambda seconds=seconds: float(next(seconds))
        )
        reached |= {run_id for run_id, row in rows.items() if row.action == SweepOutcome.SWEPT}
    assert reached == {"ann", "bea", "cy"}


def test_a_store_without_runs_is_no_error(store: LocalStore) -> None:
    assert swept(store) == {}
