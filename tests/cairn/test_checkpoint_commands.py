import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cairn.reports.errors import RunNotFound
from cairn.reports.queries.run_lookup import find_checkpoint
from cairn.storage.errors import IntegrityError
from cairn.storage.logs.log_entry import Writer
from cairn.storage.logs.registry import Registry
from cairn.storage.logs.run_entries import CheckpointQuarantined, CheckpointSuperseded
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.errors import InvalidConfiguration
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun


def test_an_alias_is_the_checkpoint_it_points_at(bard: FabricatedRun, store: LocalStore) -> None:
    assert find_checkpoint(store, "champion").reference.step == 20


def test_a_run_is_its_newest_commit(bard: FabricatedRun, store: LocalStore) -> None:
    assert find_checkpoint(store, "bard").reference.step == 30


def test_a_run_at_a_step_is_the_commit_of_that_step(bard: FabricatedRun, store: LocalStore) -> None:
    assert find_checkpoint(store, "bard@10").reference.step == 10


def test_a_step_without_a_commit_is_refused_with_the_steps_there_are(bard: FabricatedRun, store: LocalStore) -> None:
    with pytest.raises(RunNotFound, match="steps here: 10, 20, 30"):
        find_checkpoint(store, "bard@15")


def test_a_step_that_is_no_number_is_refused(bard: FabricatedRun, store: LocalStore) -> None:
    with pytest.raises(InvalidConfiguration, match="RUN@STEP"):
        find_checkpoint(store, "bard@last")


def test_a_quarantined_checkpoint_is_refused_saying_why(bard: FabricatedRun, store: LocalStore) -> None:
    reference = find_checkpoint(store, "bard@20").reference
    body = CheckpointQuarantined(
        step=20,
        attempt=reference.attempt,
        prefix=reference.prefix,
        manifest_sha256=reference.manifest_sha256,
        detail="a flipped byte",
    )
    bard.log.append(lambda state: body, writer=Writer(host="here", pid=1))
    with pytest.raises(IntegrityError, match="a flipped byte"):
        find_checkpoint(store, "bard@20")


def test_a_checkpoint_that_retention_took_is_not_there_rather_than_damaged(
    bard: FabricatedRun, cairn: Cairn, store: LocalStore
) -> None:
    reference = find_checkpoint(store, "bard@10").reference
    body = CheckpointSuperseded(**asdict(reference), why="older than the newest 2")
    bard.log.append(lambda state: body, writer=Writer(host="here", pid=1))
    ended = cairn("evaluate", "bard@10")
    assert ended.code == 2 and "step 10 of run bard is superseded (older than the newest 2)" in ended.err
    assert "steps here: 20, 30" in ended.err


def test_an_unknown_reference_is_refused_with_runs_and_aliases(bard: FabricatedRun, store: LocalStore) -> None:
    with pytest.raises(RunNotFound, match=r"runs here: bard; aliases here: champion"):
        find_checkpoint(store, "nobody")


def test_rollback_points_at_the_previous_checkpoint(bard: FabricatedRun, cairn: Cairn, store: LocalStore) -> None:
    ended = cairn("rollback", "--json")
    champion = Registry(store, "champion").refresh().champion
    assert (ended.code, json.loads(ended.out)["step"], champion and champion.step) == (0, 10, 10)


def test_rollback_beyond_the_first_promotion_is_refused(bard: FabricatedRun, cairn: Cairn) -> None:
    cairn("rollback")
    assert cairn("rollback").code == 2


def test_a_promotion_without_an_evaluation_is_refused_by_the_gate(bard: FabricatedRun, cairn: Cairn) -> None:
    ended = cairn("promote", "bard@30")
    assert ended.code == 3 and "'evaluated'" in ended.err


def test_a_promotion_that_is_no_improvement_is_refused_by_the_gate(bard: FabricatedRun, cairn: Cairn) -> None:
    ended = cairn("promote", "bard@10")
    assert ended.code == 3 and "'better'" in ended.err


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


def test_verify_of_an_unknown_run_is_a_usage_error(bard: FabricatedRun, cairn: Cairn) -> None:
    assert cairn("verify", "nobody").code == 2
