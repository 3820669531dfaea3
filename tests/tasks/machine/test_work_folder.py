"""What lies beside the log belongs to one store and one opening of a run."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from cairn.storage.logs.log_entry import EntryLog, utc_now
from cairn.storage.logs.run_entries import RUN_KINDS
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.machine.placement import trainer_folder
from tests.entries import NOON, opened, writer
from tests.memory_store import MemoryStore


def open_run(store: ObjectStore, run_id: str = "r", *, clock: Callable[[], datetime] = utc_now) -> RunLog:
    entries = EntryLog(store=store, prefix=f"runs/{run_id}/log", kinds=RUN_KINDS, clock=clock)
    log = RunLog(store, run_id, log=entries)
    log.append(lambda state: opened(run_id), writer=writer())
    return log


def folder(log: RunLog) -> Path:
    return trainer_folder({"CAIRN_CACHE": "/cache"}, log)


def test_a_run_keeps_its_work_folder() -> None:
    log = open_run(MemoryStore("one"))
    again = RunLog(log.store, "r")
    again.refresh()
    assert folder(log) == folder(again) and folder(log).name.startswith("r-")


def test_runs_of_one_name_and_moment_in_two_stores_share_no_work_folder() -> None:
    one, two = (open_run(MemoryStore(name), clock=lambda: NOON) for name in ("one", "two"))
    assert folder(one) != folder(two)


def test_a_run_that_is_opened_anew_in_an_emptied_store_shares_no_work_folder() -> None:
    assert folder(open_run(MemoryStore("one"))) != folder(open_run(MemoryStore("one")))


def test_no_run_has_the_folder_of_trainers_that_wait_for_one() -> None:
    waiting = folder(RunLog(MemoryStore("one"), "r"))
    assert waiting != folder(open_run(MemoryStore("one"), "waiting"))
