"""Which checkpoint a reference means, and what `verify` names; wrong references are refused in `command_lines`."""

import json
from pathlib import Path

import pytest

from cairn.reports.queries.run_lookup import find_checkpoint
from cairn.storage.errors import IntegrityError
from cairn.storage.logs.registry import Registry
from cairn.storage.stores.local_store import LocalStore
from tests.commands import Cairn
from tests.entries import damaged, superseded, writer
from tests.fabricated_run import FabricatedRun


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
