"""`cairn sweep`: what scripts may rely on, what people read, and that looking changes nothing."""

import json

import pytest

from cairn.storage.logs.registry import Registry
from cairn.storage.stores.local_store import LocalStore
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun

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
