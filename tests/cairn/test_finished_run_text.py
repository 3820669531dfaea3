"""What a person reads when a run has completed: its own text, and commands that can be pasted into a shell."""

import shlex
from pathlib import Path

import pytest

from cairn.cli.texts import describe_finished_run
from cairn.storage.logs.registry import Registry
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.settings import CostConfig
from cairn.tasks.configuration.stored_configuration import parse_stored_configuration
from tests import entries
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun, fabricate, store_bard
from tests.writing_run import open_writing_run


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
