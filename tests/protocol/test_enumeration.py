"""Every scenario × every operation × every fault, a share of them by default; and that no operation escapes."""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import pytest

from cairn.storage.logs.registry import MODEL_KINDS
from cairn.storage.logs.run_entries import RUN_KINDS
from cairn.storage.stores.object_store import ObjectStore
from tests.full_amount import FULL, share_of
from tests.protocol.enumeration import ALL_SCENARIOS, TROUBLES, default_cases, operations, run_case
from tests.protocol.forks import FORK, FORKS
from tests.protocol.invariants import continue_run, examine
from tests.protocol.processes import ALIAS, PREFIX, Process
from tests.protocol.raw_history import read_raw
from tests.protocol.scenarios import SCENARIOS, Scenario, world_before
from tests.protocol.world import Copies, Ledger, WatchedStore, as_store
from tests.storage.faulty_store import Death, Fault, FaultyStore

# `url` and `local_path` ask nobody: they name a place. What is read there is the file system's business.
# `delete_all` is tried as one `delete` after the other; `size` asks for nothing that `sizes` does not;
# `age_seconds` only refuses, before any claim.
NOT_OPERATIONS = frozenset({"url", "reserve", "local_path", "delete_all", "size", "age_seconds"})
# Kinds no process of this folder appends, each with the reason.
OTHER_KINDS: dict[str, str] = {
    "members-changed": "moves no checkpoint and no owner either",
    "data-quarantined": "moves no checkpoint and no owner: appended like any other entry of an attempt",
}


ON = {"memory": ALL_SCENARIOS, "local": ALL_SCENARIOS[:: share_of(3)], "gs": ALL_SCENARIOS, "az": ALL_SCENARIOS}
SLOW = {"gs": pytest.mark.slow, "az": pytest.mark.slow}  # quick witness: the same in memory and on files


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        pytest.param(scenario, kind, id=f"{scenario.name}-{kind}", marks=SLOW.get(kind, ()))
        for kind, scenarios in ON.items()
        for scenario in scenarios
    ],
)
def test_a_fault_at_any_operation_breaks_no_invariant(
    scenario: Scenario, kind: str, quick_folder: Path, record_property: Callable[[str, object], None]
) -> None:
    copies = Copies(kind, quick_folder, world_before(scenario))
    number = 0
    for case in default_cases(scenario, copies):
        run_case(case, copies)
        number += 1
    record_property("protocol_cases", number)
    assert number >= (11 if FULL else 1)


def test_every_kind_of_trouble_is_among_the_cases_that_are_tried_in_memory(tmp_path: Path) -> None:
    worlds = ((item, Copies("memory", tmp_path, world_before(item))) for item in ALL_SCENARIOS)
    tried = {case.trouble for scenario, copies in worlds for case in default_cases(scenario, copies)}
    assert set(TROUBLES) - tried == set()


def test_a_process_that_dies_twice_during_its_resume_still_resumes(tmp_path: Path) -> None:
    resume = next(scenario for scenario in SCENARIOS if scenario.name == "quarantine-and-resume")
    copies = Copies("memory", tmp_path, world_before(resume))
    number = 0
    for first in range(0, len(operations(resume, copies).operations), share_of(96)):
        for second in range(0, 100, share_of(3)):
            store, ledger = copies.fresh(), deepcopy(copies.snapshot.ledger)
            die_during(resume, store, ledger, first)
            if not die_during(resume, store, ledger, second):
                break
            number += 1
            examine(store, ledger)
            continue_run(store, ledger)
    assert number > 900 // share_of(96 * 3)


def die_during(scenario: Scenario, store: WatchedStore, ledger: Ledger, at: int) -> bool:
    """Let the process die right after its operation `at`; False when it is done before."""
    faulty = FaultyStore(as_store(store), Fault.DEATH_AFTER, at)
    with suppress(Death):
        scenario.act(Process(store=faulty, ledger=ledger))
    return faulty.fired


def appended(scenario: Scenario, folder: Path) -> set[str]:
    """Kinds of the entries that the scenario itself appends."""
    copies = Copies("memory", folder, world_before(scenario))
    store = copies.fresh()
    logs = (f"{PREFIX}/log", f"models/{ALIAS}/log", f"runs/{FORK}/log")
    before = {log: len(read_raw(store.inner, log)) for log in logs}
    scenario.act(Process(store=store, ledger=deepcopy(copies.snapshot.ledger)))
    return {raw["kind"] for log in logs for raw in read_raw(store.inner, log)[before[log] :]}


def test_every_kind_of_entry_is_appended_by_a_scenario(tmp_path: Path) -> None:
    found = set().union(*(appended(scenario, tmp_path) for scenario in (*SCENARIOS, *FORKS)))
    assert {*RUN_KINDS, *MODEL_KINDS} - found - OTHER_KINDS.keys() == set()


def test_every_method_of_a_store_is_called_by_a_scenario(tmp_path: Path) -> None:
    methods = {name for name in vars(ObjectStore) if not name.startswith("_")} - NOT_OPERATIONS
    called: set[str] = set()
    for scenario in SCENARIOS:
        called |= set(operations(scenario, Copies("memory", tmp_path, world_before(scenario))).operations)
    assert methods - called == set()


def test_counting_the_same_scenario_twice_gives_the_same_operations(tmp_path: Path) -> None:
    for scenario in SCENARIOS:
        copies = Copies("memory", tmp_path, world_before(scenario))
        assert operations(scenario, copies).operations == operations(scenario, copies).operations
