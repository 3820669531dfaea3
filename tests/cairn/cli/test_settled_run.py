"""`cairn train` where a flow would have nothing to do: it is answered from the log, before Prefect is imported.

That neither Prefect nor torch is imported, and so no server started, is in `test_real_commands`.
"""

import json
import os
import shlex
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.cli.texts import describe_finished_run
from cairn.flows.operations.checkpoint_operations import end_on_record
from cairn.storage.logs.registry import Registry
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.s3_store import S3Store
from cairn.tasks.configuration.settings import CostConfig
from cairn.tasks.configuration.stored_configuration import parse_stored_configuration
from tests import entries
from tests.commands import Cairn, Ended
from tests.fabricated_run import FabricatedRun, configuration, fabricate, promote, store_bard
from tests.file_ceilings import slowness
from tests.s3.servers import aws_environment, s3_server
from tests.settled_run import SUITE, finish, hold, store_done
from tests.writing_run import open_writing_run

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


def refuse(run: FabricatedRun, gate: str) -> None:
    """Record that the champion's alias refused the run's newest commit."""
    newest = run.log.state.newest_committed
    assert newest is not None
    where = {"step": newest.committed.step, "manifest_sha256": newest.committed.manifest_sha256}
    body = entries.refused(run_id=run.log.run_id, gate=gate, **where)
    Registry(run.log.store, "champion").append(lambda state: body)


def commands(run: FabricatedRun, store_url: str) -> list[str]:
    lines = block(run, store_url)
    return [line.strip() for line in lines[lines.index("try:") + 1 :]]


def block(run: FabricatedRun, store_url: str = "./cairn-store", *, price: float | None = None) -> list[str]:
    assert run.log.state.opened is not None
    config = parse_stored_configuration(run.log.state.opened.config)
    priced = config.model_copy(update={"cost": CostConfig(gpu_hour_price=price)})
    return list(describe_finished_run(run.log, priced, store_url, "trained"))


@pytest.fixture
def beaten(bard: FabricatedRun, store: LocalStore) -> FabricatedRun:
    """A run with a commit, in a store whose champion is another run's."""
    run = fabricate(store, "beaten")
    run.start()
    run.commit(10)
    return run


def test_the_champions_run_suggests_to_sample_the_champion(bard: FabricatedRun) -> None:
    assert commands(bard, "./cairn-store")[0] == 'cairn sample champion --prompt "The "'


def test_another_runs_champion_is_not_suggested(beaten: FabricatedRun) -> None:
    refuse(beaten, "better")
    assert commands(beaten, "./cairn-store")[0] == 'cairn sample beaten --prompt "The "'


def test_after_a_refusal_the_command_for_another_alias_is_named(beaten: FabricatedRun) -> None:
    refuse(beaten, "better")
    assert commands(beaten, "./cairn-store")[1] == "cairn promote beaten@10 --alias beaten-best"


def test_another_alias_is_not_named_where_its_gate_would_refuse_too(beaten: FabricatedRun) -> None:
    refuse(beaten, "verdict")
    assert not any("promote" in line for line in commands(beaten, "./cairn-store"))


def test_the_end_says_what_is_committed_and_where(bard: FabricatedRun) -> None:
    newest = bard.log.state.newest_committed
    assert newest is not None
    where = f"{bard.log.store.url}/{newest.committed.prefix}"
    assert f"committed: step {newest.committed.step}, {where}" in block(bard)


def test_the_end_says_the_cost_in_time_and_in_money_where_a_price_is_known(bard: FabricatedRun) -> None:
    (free,) = (line for line in block(bard) if line.startswith("cost: "))
    (priced,) = (line for line in block(bard, price=3.0) if line.startswith("cost: "))
    assert " of devices in " in free and priced == f"{free}, {priced.removeprefix(f'{free}, ')}"
    assert priced.endswith(CostConfig().currency)


def test_every_fact_of_the_end_is_said_once(bard: FabricatedRun) -> None:
    names = [line.split(":")[0] for line in block(bard) if ": " in line and not line.startswith("  ")]
    assert len(names) == len(set(names))


def test_the_commands_find_a_store_whose_path_has_a_space(tmp_path: Path, cairn: Cairn) -> None:
    store = tmp_path / "a store"
    run = store_bard(LocalStore(store))
    program, *words = shlex.split(commands(run, str(store))[1])
    assert (program, cairn(*words).code) == ("cairn", 0)


def test_a_fork_is_trained_by_a_command_that_finds_such_a_store(tmp_path: Path, cairn: Cairn) -> None:
    store = tmp_path / "a store"
    run = open_writing_run(LocalStore(store), tmp_path)
    run.start()
    run.commit(20)
    ended = cairn("fork", "bard@20", "fork", "--store", str(store))
    assert shlex.split(ended.err.splitlines()[-1])[-2:] == ["--store", str(store)]
