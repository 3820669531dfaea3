"""`cairn train` where a flow would have nothing to do: it is answered from the log, before Prefect is imported.

That neither Prefect nor torch is imported, and so no server started, is in `test_real_commands`.
"""

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.flows.operations.checkpoint_operations import end_on_record
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.s3_store import S3Store
from tests.commands import Cairn, Ended
from tests.fabricated_run import configuration, fabricate, promote
from tests.file_ceilings import slowness
from tests.s3.servers import aws_environment, s3_server
from tests.settled_run import SUITE, finish, hold, store_done

BEATS_RARELY = ("--set", "lease.heartbeat_seconds=300", "--set", "lease.seconds=900")


def timed(cairn_process: Cairn, run_id: str, *options: str) -> Ended:
    """Train a run, which takes less than two seconds of a core."""
    before = os.times()
    ended = cairn_process("train", "--run-id", run_id, *options)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert seconds < 2.0 * slowness()
    return ended


def test_a_finished_run_says_so_and_names_what_can_be_done_next(cairn: Cairn, store: LocalStore) -> None:
    store_done(store)
    ended = cairn("train", "--run-id", "done")
    assert ended.code == 0 and "run done: it is finished, at step 40; nothing to do: trained; champion" in ended.err
    for next_one in ("cairn sample", "cairn status done", "cairn fork done NEW --set training.steps=80"):
        assert next_one in ended.err


def test_a_finished_run_is_answered_with_its_status_on_request(cairn: Cairn, store: LocalStore) -> None:
    store_done(store)
    assert json.loads(cairn("train", "--run-id", "done", "--json").out)["state"] == "finished"


def test_the_answer_for_a_finished_run_appends_nothing(cairn: Cairn, store: LocalStore) -> None:
    run = store_done(store)
    before = run.log.refresh()
    cairn("train", "--run-id", "done")
    assert run.log.refresh() == before


def test_a_finished_run_is_answered_in_less_than_two_seconds_of_a_core(cairn_process: Cairn, store: LocalStore) -> None:
    store_done(store)
    assert timed(cairn_process, "done").code == 0


def test_a_run_needs_its_flow_until_every_suite_has_seen_its_last_checkpoint_and_it_was_offered(
    store: LocalStore,
) -> None:
    run, last = finish(store)
    assert end_on_record(run.log, configuration()) == "", "not evaluated"
    run.evaluate(last, loss=2.5, suite_sha256=SUITE)
    assert end_on_record(run.log, configuration()) == "", "never offered"
    assert end_on_record(run.log, configuration(["promotion.require_approval=true"])) == "", "and nobody was asked"
    promote(store, "done", last, loss=2.5, alias="champion")
    assert end_on_record(run.log, configuration()) != ""
    assert end_on_record(run.log, configuration(["evaluation.batches=3"])) == "", "a further suite has not seen it"


def test_a_live_owner_of_this_machine_is_named_at_once(cairn: Cairn, store: LocalStore) -> None:
    hold(fabricate(store, "held"))
    ended = cairn("train", "--run-id", "held", *BEATS_RARELY)
    assert ended.code == 7 and f"(pid {os.getpid()}) is at work; wait for it or stop it there" in ended.err


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])  # quick witness: the folder
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    """A store that two machines share, and the environment that leads to it."""
    if request.param == "local":
        yield LocalStore(tmp_path / "store")
        return
    server = s3_server("quick", tmp_path)
    with aws_environment(server.environment()):
        yield S3Store(server.bucket(), uuid.uuid4().hex)


def test_a_live_owner_of_another_machine_is_named_in_less_than_two_seconds_of_a_core(
    cairn_process: Cairn, shared: ObjectStore
) -> None:
    run = fabricate(shared, "held")
    run.start(host="elsewhere")
    run.beat(3)
    ended = timed(cairn_process, "held", "--store", shared.url, *BEATS_RARELY)
    assert ended.code == 7 and "on elsewhere" in ended.err and "ago by the store's clock; wait for it" in ended.err
