"""`cairn delete`: what it asks, refuses and leaves, and that a kill in the middle costs nothing."""

import json
import os
import pty
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cairn.storage.stores.local_store import LocalStore
from tests.commands import Cairn, Ended, run_python
from tests.fabricated_run import FabricatedRun, fabricate
from tests.settled_run import hold

CHECKPOINTS = "runs/old/checkpoints"
KILLED = """
import os, signal
from cairn.cli.command import main
from cairn.storage.stores.local_store import LocalStore

delete, deleted = LocalStore.delete, []

def delete_two(self, key):
    if len(deleted) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    deleted.append(key)
    delete(self, key)

LocalStore.delete = delete_two
main(["delete", "old", "--yes"])
"""


@pytest.fixture
def old(store: LocalStore) -> FabricatedRun:
    """A run with two commits that came to its end."""
    run = fabricate(store, "old")
    run.start()
    run.commit(20)
    run.complete()
    return run


@contextmanager
def typing(line: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a terminal as standard input, on which somebody has typed a line."""
    person, terminal = pty.openpty()
    os.write(person, f"{line}\n".encode())
    with open(terminal, encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", stream)
        yield
    os.close(person)


def states(ended: Ended) -> dict[str, str]:
    return {row["run_id"]: row["state"] for row in json.loads(ended.out)}


def test_without_a_terminal_it_wants_yes(old: FabricatedRun, cairn: Cairn, store: LocalStore) -> None:
    before, ended = store.keys("runs"), cairn("delete", "old")
    assert (ended.code, ended.out, store.keys("runs")) == (2, "", before)
    assert ended.err == "cairn: delete old: there is no terminal to ask on; add --yes, or --dry-run\n"


def test_a_dry_run_says_what_would_go_and_changes_nothing(old: FabricatedRun, cairn: Cairn, store: LocalStore) -> None:
    before, ended = store.keys("runs"), cairn("delete", "old", "--dry-run")
    size = sum(store.size(key) or 0 for key in store.keys(CHECKPOINTS))
    assert (ended.code, store.keys("runs")) == (0, before)
    assert ended.out.splitlines() == [
        f"run old: would delete 2 checkpoints ({size:,} bytes)",
        "its log, receipts and curve stay (`cairn runs --archived`), and its data snapshot dddddddd",
    ]


def test_on_a_terminal_the_runs_name_deletes_it(
    old: FabricatedRun, cairn: Cairn, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with typing("old", monkeypatch):
        ended = cairn("delete", "old")
    assert (ended.code, store.keys(CHECKPOINTS)) == (0, [])
    assert "type old to delete it:" in ended.err and "2 checkpoints" in ended.out


def test_on_a_terminal_any_other_answer_keeps_it(
    old: FabricatedRun, cairn: Cairn, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.keys("runs")
    with typing("yes", monkeypatch):
        ended = cairn("delete", "old")
    assert (ended.code, store.keys("runs")) == (2, before)
    assert "'yes' is not 'old': nothing is deleted" in ended.err


def test_as_json_it_is_one_record(old: FabricatedRun, cairn: Cairn, store: LocalStore) -> None:
    size = sum(store.size(key) or 0 for key in store.keys(CHECKPOINTS))
    ended = cairn("delete", "old", "--yes", "--json")
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out) == {
        "run_id": "old",
        "checkpoints": 2,
        "bytes": size,
        "withdrawn_from": [],
        "data_snapshot": "d" * 64,
        "freed_bytes": size,
    }


def test_what_an_alias_needs_is_refused_by_name(bard: FabricatedRun, cairn: Cairn, store: LocalStore) -> None:
    before, ended = store.keys("runs"), cairn("delete", "bard", "--yes")
    assert (ended.code, store.keys("runs")) == (3, before)
    assert "alias champion: points at step 20; `cairn promote OTHER --alias champion` moves it on" in ended.err


def test_a_live_owner_keeps_the_run_before_anything_is_asked(cairn: Cairn, store: LocalStore) -> None:
    run = fabricate(store, "alive")
    hold(run)
    ended = cairn("delete", "alive")
    assert (ended.code, run.log.refresh().deleted) == (7, None)
    assert "run alive: attempt 1 on " in ended.err and "is at work; wait for it or stop it there" in ended.err


def test_a_deleted_run_is_listed_among_the_archived_only(old: FabricatedRun, cairn: Cairn) -> None:
    fabricate(old.log.store, "other")
    cairn("delete", "old", "--yes")
    assert states(cairn("runs", "--json")) == {"other": "opened"}
    assert states(cairn("runs", "--archived", "--json")) == {"old": "deleted"}


def test_status_and_sql_say_that_it_was_deleted_and_how_far_it_came(old: FabricatedRun, cairn: Cairn) -> None:
    cairn("delete", "old", "--yes", "--why", "a first try")
    status = json.loads(cairn("status", "old", "--json").out)
    assert (status["state"], status["step"], status["newest_committed_step"]) == ("deleted", 40, None)
    assert status["next"].startswith("nothing: run old was deleted on ")
    (row,) = json.loads(cairn("sql", "select state, step, deleted_at is not null as dated from runs", "--json").out)
    assert row == {"state": "deleted", "step": 40, "dated": True}


def test_its_records_can_still_be_read(old: FabricatedRun, cairn: Cairn) -> None:
    cairn("delete", "old", "--yes")
    verbs = ("attempts", "checkpoints", "explain", "log", "report", "verify")
    codes = {verb: cairn(verb, "old").code for verb in verbs}
    assert {verb: code for verb, code in codes.items() if code} == {"verify": 5}, "its data were never there"


@pytest.mark.parametrize("line", ["train --run-id old", "fork old new", "fork old@20 new", "sample old"])
def test_what_needs_its_checkpoints_says_that_it_was_deleted(old: FabricatedRun, cairn: Cairn, line: str) -> None:
    cairn("delete", "old", "--yes")
    ended = cairn(*line.split())
    assert (ended.code, "run old was deleted on " in ended.err) == (2, True), ended.err


def test_nothing_is_left_to_delete_the_second_time(old: FabricatedRun, cairn: Cairn) -> None:
    cairn("delete", "old", "--yes")
    again = cairn("delete", "old")
    assert (again.code, again.out.splitlines()[0]) == (0, "run old: deleted 0 checkpoints (0 bytes)")


def test_after_a_kill_in_the_middle_status_says_so_and_the_same_command_goes_on(
    old: FabricatedRun, cairn: Cairn, store: LocalStore, tmp_path: Path
) -> None:
    killed = run_python(("-c", KILLED), tmp_path, {})
    assert (killed.code, len(store.keys(CHECKPOINTS)) > 0) == (-signal.SIGKILL, True)
    assert states(cairn("runs", "--json")) == {"old": "deleting"}
    assert "`cairn delete old` goes on" in cairn("status", "old").out
    assert (cairn("delete", "old").code, store.keys(CHECKPOINTS)) == (0, [])
    assert states(cairn("runs", "--archived", "--json")) == {"old": "deleted"}
