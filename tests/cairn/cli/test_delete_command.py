"""`cairn delete`, `sweep`, `verify` and references: what is deleted, refused, left and named."""

import json
import os
import pty
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cairn.reports.queries.run_lookup import find_checkpoint
from cairn.storage.errors import IntegrityError
from cairn.storage.logs.registry import Registry
from cairn.storage.stores.local_store import LocalStore
from tests.commands import Cairn, Ended, run_python
from tests.entries import damaged, superseded, writer
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


STAGED = "runs/bard/checkpoints/step-00000040-attempt-0002"
ORPHAN = "runs/bard/checkpoints/step-00000025-attempt-0001"


@pytest.fixture
def long(bard: FabricatedRun, store: LocalStore) -> FabricatedRun:
    """bard with two more commits and an orphan of its first attempt: 10 goes unless the alias needs it."""
    for step in (35, 38):
        bard.commit(step)
    store.write(f"{ORPHAN}/weights-00001-of-00001.safetensors", b"half")
    return bard


def committed_bytes(run: FabricatedRun, step: int) -> int:
    return next(record.committed.bytes for record in run.log.refresh().checkpoints if record.committed.step == step)


def test_a_dry_run_as_json_says_what_and_why(long: FabricatedRun, cairn: Cairn) -> None:
    document = json.loads(cairn("sweep", "bard", "--dry-run", "--json").out)
    assert (document["run_id"], document["dry_run"], document["freed_bytes"]) == ("bard", True, 4)
    assert {*document["items"][0]} == {"kind", "key", "step", "attempt", "action", "why", "bytes"}
    assert [(item["kind"], item["step"], item["action"], item["why"]) for item in document["items"]] == [
        ("staged", 25, "delete", "attempt 1 has ended without committing it"),
        ("staged", 40, "keep", "attempt 2 may still commit it"),
        ("checkpoint", 10, "keep", "alias champion"),
        ("checkpoint", 20, "keep", "alias champion; attempt 2 resumed from it"),
        ("checkpoint", 30, "keep", "newest 3"),
        ("checkpoint", 35, "keep", "newest 3"),
        ("checkpoint", 38, "keep", "newest 3; nothing newer to resume from"),
    ]


def test_a_dry_run_changes_nothing(long: FabricatedRun, cairn: Cairn, store: LocalStore) -> None:
    before = store.keys("runs")
    assert (cairn("sweep", "bard", "--dry-run").code, store.keys("runs")) == (0, before)


def test_a_sweep_deletes_what_its_dry_run_named(long: FabricatedRun, cairn: Cairn, store: LocalStore) -> None:
    ended = cairn("sweep", "bard", "--json")
    assert (ended.code, json.loads(ended.out)["dry_run"]) == (0, False)
    assert store.keys(ORPHAN) == [] and store.keys(STAGED) != []


def test_the_policy_is_the_newest_attempts_and_a_deleted_checkpoint_is_still_listed_with_its_state(
    long: FabricatedRun, cairn: Cairn, store: LocalStore
) -> None:
    for key in store.keys("models"):
        store.delete(key)
    document = json.loads(cairn("sweep", "bard", "--json").out)
    superseded = [(item["step"], item["why"]) for item in document["items"] if item["action"] == "supersede"]
    assert superseded == [(10, "older than the newest 3, not evaluated")]
    assert document["freed_bytes"] == committed_bytes(long, 10) + 4
    listed = json.loads(cairn("checkpoints", "bard", "--json").out)
    states = {**{step: "committed" for step in (20, 30, 35, 38)}, 10: "deleted", 40: "writing"}
    assert {item["step"]: item["state"] for item in listed} == states


def test_people_read_what_happens_why_and_a_total(long: FabricatedRun, cairn: Cairn) -> None:
    lines = cairn("sweep", "bard").out.splitlines()
    assert lines[0].split() == ["action", "what", "step", "attempt", "bytes", "why", "where"]
    assert lines[-1] == "run bard: kept 6, deleted 1; freed 4 bytes"


def test_people_are_told_that_a_dry_run_changed_nothing(long: FabricatedRun, cairn: Cairn) -> None:
    assert (
        cairn("sweep", "bard", "--dry-run")
        .out.splitlines()[-1]
        .endswith("freed 4 bytes (a sweep would do this; nothing was changed)")
    )


@pytest.mark.unsound_log
def test_a_registry_that_cannot_be_read_is_an_integrity_error_and_keeps_everything(
    long: FabricatedRun, cairn: Cairn, store: LocalStore
) -> None:
    store.write(store.keys("models/champion/log")[0], b"{}")
    before, ended = store.keys("runs"), cairn("sweep", "bard")
    assert (ended.code, store.keys("runs")) == (5, before)
    assert "alias champion cannot be read" in ended.err


def test_the_alias_still_resolves_after_a_sweep(long: FabricatedRun, cairn: Cairn, store: LocalStore) -> None:
    cairn("sweep", "bard")
    assert cairn("verify", "bard").err.count("checkpoints/") == 0
    champion = Registry(store, "champion").refresh().champion
    assert champion is not None and store.keys(champion.prefix) != []


@pytest.mark.parametrize(
    ("reference", "step"),
    [("champion", 20), ("bard", 30), ("bard@10", 10)],
    ids=["an alias: where it points", "a run: its newest commit", "a run at a step: the commit of that step"],
)
def test_a_reference_is_found(bard: FabricatedRun, store: LocalStore, reference: str, step: int) -> None:
    assert find_checkpoint(store, reference).reference.step == step


def test_a_quarantined_checkpoint_is_refused_saying_why(bard: FabricatedRun, store: LocalStore) -> None:
    reference = find_checkpoint(store, "bard@20").reference
    bard.log.append(lambda state: damaged(reference, "a flipped byte"), writer=writer())
    with pytest.raises(IntegrityError, match="a flipped byte"):
        find_checkpoint(store, "bard@20")


def test_a_checkpoint_that_retention_took_is_not_there_rather_than_damaged(
    bard: FabricatedRun, cairn: Cairn, store: LocalStore
) -> None:
    reference = find_checkpoint(store, "bard@10").reference
    bard.log.append(lambda state: superseded(reference, "older than the newest 2"), writer=writer())
    ended = cairn("evaluate", "bard@10")
    assert ended.code == 2 and "step 10 of run bard is superseded (older than the newest 2)" in ended.err
    assert "steps here: 20, 30" in ended.err


def test_rollback_points_at_the_previous_checkpoint(bard: FabricatedRun, cairn: Cairn, store: LocalStore) -> None:
    ended = cairn("rollback", "--json")
    champion = Registry(store, "champion").refresh().champion
    assert (ended.code, json.loads(ended.out)["step"], champion and champion.step) == (0, 10, 10)


def test_rollback_beyond_the_first_promotion_is_refused(bard: FabricatedRun, cairn: Cairn) -> None:
    cairn("rollback")
    assert cairn("rollback").code == 2


def test_verify_names_the_object_that_was_changed(bard: FabricatedRun, cairn: Cairn, tmp_path: Path) -> None:
    prefix = "runs/bard/checkpoints/step-00000020-attempt-0001"
    shard = tmp_path / "store" / prefix / "weights-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    ended = cairn("verify", "bard")
    assert ended.code == 5 and f"{prefix}/weights" in ended.err


@pytest.mark.unsound_log
def test_verify_names_an_entry_behind_a_hole_in_the_log(bard: FabricatedRun, cairn: Cairn, tmp_path: Path) -> None:
    (tmp_path / "store" / "runs" / "bard" / "log" / "9999999991.json").unlink()
    assert "seq 8 is missing" in cairn("verify", "bard").err
