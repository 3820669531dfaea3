"""The power fails at any moment of a run on local files: what was not synced is lost, what was acknowledged is not."""

import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import cairn.storage.stores.local_store as local_store
from cairn.storage.errors import StorageError
from cairn.storage.stores.local_store import LocalStore
from tests.full_amount import share_of
from tests.protocol import processes
from tests.protocol.invariants import continue_run, examine
from tests.protocol.power_cut import Disk, File, Folder, Node, Renamed, Synced, cut, lay_out
from tests.protocol.processes import PREFIX, Process
from tests.protocol.quick_world import witnessed
from tests.protocol.raw_history import GONE, Violation, mirrored, tell_run
from tests.protocol.world import Ledger, WatchedStore
from tests.storage.faulty_store import Death

CUTS = 1000 // share_of(40)
DEATHS, CUTS_AFTER_DEATH = 80 // share_of(26), 5


class Answers(dict[str, Any]):
    """Part of a ledger that remembers after how many events of the disk each answer was given."""

    def __init__(self, disk: Disk) -> None:
        self._disk, self._given = disk, list[tuple[int, str, Any]]()

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._given.append((len(self._disk.events), name, value))

    def until(self, event: int) -> dict[str, Any]:
        """Return what had been answered by then."""
        return {name: value for at, name, value in self._given if at <= event}


def train_and_sweep(process: Process) -> None:
    """Open a run, train two attempts that commit, evaluate and promote, and sweep twice."""
    processes.open_run(process)
    processes.train(process, commits=2, evaluated=True)
    processes.promote(process, process.log().refresh().readable[0].committed.prefix)
    processes.sweep(process)
    processes.train(process, commits=2, finish=True)
    processes.sweep(process)


def record_run(folder: Path, *, dies_after: int | None = None) -> tuple[Disk, Ledger]:
    """Return all that a run writes; a process that dies after so many calls to the disk is followed by another."""
    folder.mkdir()
    disk = Disk(folder, dies_after=dies_after)
    ledger = Ledger(entries=Answers(disk), committed=Answers(disk))
    with disk.recording(), witnessed(ledger):
        with suppress(Death):
            train_and_sweep(Process(store=WatchedStore(LocalStore(folder / "store")), ledger=ledger))
        if disk.is_dead:
            disk.is_dead = False
            train_and_sweep(Process(store=WatchedStore(LocalStore(folder / "store")), ledger=ledger))
    return disk, ledger


def survive(disk: Disk, ledger: Ledger, place: Path, *, seed: int) -> None:
    """Cut the power as the seed says and ask for everything that was acknowledged; then the run goes on."""
    chance = random.Random(seed)
    event = chance.randint(0, len(disk.events))
    lay_out(cut(disk, event, chance), place)
    entries, committed = ledger.entries, ledger.committed
    assert isinstance(entries, Answers) and isinstance(committed, Answers)
    known = Ledger(entries=entries.until(event), committed=committed.until(event))
    store = WatchedStore(LocalStore(place / "store"))
    try:
        if came_back(store.inner):
            processes.sweep(Process(store=store, ledger=known))
        examine(store, known)
        continue_run(store, known)
    except (Violation, StorageError, ValueError) as violation:  # what cannot be asked does not hold either
        raise Violation(f"{violation} [seed {seed}, after event {event} of {len(disk.events)}]") from violation
    finally:
        shutil.rmtree(place)


def came_back(store: LocalStore) -> bool:
    """Whether objects of a deleted checkpoint are there again: no deletion is synced, the next sweep deletes again."""
    status = tell_run(mirrored(store), PREFIX).status
    return any(status[prefix] == GONE and store.keys(prefix) for prefix in status)


class Worst(random.Random):
    """The chance by which nothing survives that was not synced."""

    def random(self) -> float:
        return 0.0

    def randint(self, a: int, b: int) -> int:
        return a


def test_nothing_acknowledged_is_lost_by_a_power_cut_and_the_run_goes_on(quick_folder: Path) -> None:
    disk, ledger = record_run(quick_folder / "recorded")
    for seed in range(CUTS):
        survive(disk, ledger, quick_folder / "left", seed=seed)


def test_nothing_acknowledged_is_lost_where_a_process_died_before_it_had_synced_and_another_went_on(
    quick_folder: Path,
) -> None:
    undisturbed, _ = record_run(quick_folder / "undisturbed")
    for death in range(DEATHS):
        chance = random.Random(death)
        disk, ledger = record_run(quick_folder / str(death), dies_after=chance.randint(1, undisturbed.calls))
        for number in range(CUTS_AFTER_DEATH):
            survive(disk, ledger, quick_folder / "left", seed=death * CUTS_AFTER_DEATH + number)


@pytest.mark.parametrize("kind", [File, Folder])
def test_a_store_that_forgets_to_sync_is_found_out(quick_folder: Path, kind: type[Node]) -> None:
    disk, ledger = record_run(quick_folder / "recorded")
    nothing = Renamed(Folder(), ())
    disk.events = [nothing if isinstance(e, Synced) and isinstance(e.node, kind) else e for e in disk.events]
    with pytest.raises(Violation):
        for seed in range(CUTS):
            survive(disk, ledger, quick_folder / "left", seed=seed)


def test_a_folder_made_by_a_process_that_died_before_it_was_synced_is_synced_by_the_next_that_writes_there(
    quick_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(quick_folder / "recorded")
    disk.root.mkdir()

    def die(path: Path) -> None:
        raise Death

    with disk.recording():
        with monkeypatch.context() as patch, pytest.raises(Death):
            patch.setattr(local_store, "fsync_path", die)
            LocalStore(disk.root / "store").create("a/b", b"lost")
        assert LocalStore(disk.root / "store").create("a/c", b"kept")
    assert cut(disk, len(disk.events), Worst())["store/a/c"] == b"kept"
