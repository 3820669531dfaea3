"""A sweep deletes exactly what is no longer needed, whatever fails and however many sweeps run at once."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cairn.storage.checkpoints.checkpoint import checkpoint_target, verify_checkpoint
from cairn.storage.checkpoints.resume_point import new_pin, pin_checkpoint, quarantine_checkpoint
from cairn.storage.checkpoints.sweep import SweepReport, sweep
from cairn.storage.errors import IntegrityError, StorageError
from cairn.storage.logs.log_entry import CheckpointReference, EntryLog, entry_name
from cairn.storage.logs.registry import MODEL_KINDS, Registry, RolledBack
from cairn.storage.logs.run_entries import CheckpointCommitted, Placement, ReadEvidence
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.checkpoints.promotion import Candidate, PromotionRules, offer
from cairn.tasks.checkpoints.retention import RetentionTerms, plan_retention, sweep_run
from cairn.tasks.configuration.settings import CheckpointConfig
from tests.entries import ended, evaluated, placement, refusals, writer
from tests.full_amount import share_of
from tests.memory_store import MemoryStore
from tests.storage.builders import (
    RUN,
    check_invariants,
    claim,
    clock,
    commit,
    copy_objects,
    laid_out,
    newest_entry,
    no_sleep,
    promoted,
    run_log,
    run_with_commits,
    stage,
)
from tests.storage.faulty_store import Death, Fault, FaultyStore
from tests.storage.inline_executor import InlineExecutor

pytestmark = pytest.mark.usefixtures("registry_that_does_not_sleep", "one_dead_process")

CHECKPOINTS = f"runs/{RUN}/checkpoints"
DEAD_PID = 666
KEEP_TWO = CheckpointConfig(keep_last=2, keep_best=0)


@pytest.fixture
def registry_that_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once: the faults here pass without time."""

    def opened(store: ObjectStore, alias: str) -> Registry:
        prefix = f"models/{alias}/log"
        return Registry(
            store, alias, log=EntryLog(store=store, prefix=prefix, kinds=MODEL_KINDS, clock=clock, sleep=no_sleep)
        )

    monkeypatch.setattr("cairn.storage.logs.registry.Registry", opened)


@pytest.fixture
def one_dead_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_dead(pinned_by: Placement) -> bool:
        return pinned_by.pid == DEAD_PID

    monkeypatch.setattr("cairn.tasks.checkpoints.retention.is_known_dead", is_dead)


def swept(store: ObjectStore, *, policy: CheckpointConfig = KEEP_TWO, dry_run: bool = False) -> SweepReport:
    return sweep_run(run_log(store), policy, "s", dry_run=dry_run)


def prefix_of(step: int, attempt: int = 1) -> str:
    return checkpoint_target(RUN, step=step, attempt=attempt).prefix


def committed_at(log: RunLog, step: int, attempt: int = 1) -> CheckpointCommitted:
    record = log.refresh().find(prefix_of(step, attempt))
    assert record is not None
    return record.committed


def pin(log: RunLog, step: int, pin_id: str, *, pid: int = 1, alias: str | None = None) -> None:
    purpose = {"alias": alias, "suite_sha256": None if alias else "s"}
    body = new_pin(committed_at(log, step).reference, placement(pid=pid), **purpose)
    assert pin_checkpoint(log, replace(body, pin_id=pin_id), writer=writer())


def promote(log: RunLog, step: int, *, loss: float) -> CheckpointReference:
    reference = committed_at(log, step, log.refresh().latest_attempt).reference
    candidate = Candidate(run_id=RUN, reference=reference, evaluations=(evaluated(step, loss),), by="a test")
    offer(log, Registry(log.store, "champion"), candidate, PromotionRules())
    return reference


@cache
def made_of_everything() -> MemoryStore:
    """Six commits and an orphan of a first attempt, pins of the living and the dead, a champion, a live attempt."""
    store = MemoryStore("everything")
    log = run_with_commits(store, 10, 20, 30, 40, 50, 60)
    pin(log, 10, "dead-evaluation", pid=DEAD_PID)
    pin(log, 20, "live-evaluation")
    pin(log, 40, "dead-offer", pid=DEAD_PID, alias="other")
    promote(log, 30, loss=2.0)
    stage(store, step=70, attempt=1)
    claim(log)
    stage(store, step=80, attempt=2)
    return store


def everything_at_once(store: ObjectStore) -> None:
    """Give the store a copy of all that."""
    copy_objects(made_of_everything(), store)


def states(state: RunState) -> dict[int, str]:
    return {record.committed.step: record.state for record in state.checkpoints}


def folders(store: ObjectStore) -> list[int]:
    """Steps of the folders with objects in them."""
    return sorted({int(key.removeprefix(f"{CHECKPOINTS}/step-").split("-")[0]) for key in store.keys(CHECKPOINTS)})


def test_a_sweep_deletes_exactly_the_superseded_and_the_orphans(store: ObjectStore) -> None:
    everything_at_once(store)
    swept(store)
    assert folders(store) == [20, 30, 50, 60, 80]
    kept = {20: "committed", 30: "committed", 50: "committed", 60: "committed"}
    assert states(check_invariants(store, set())) == kept | {10: "deleted", 40: "deleted"}


def test_a_sweep_right_after_a_sweep_does_nothing(store: ObjectStore) -> None:
    everything_at_once(store)
    swept(store)
    before, again = run_log(store).refresh(), swept(store)
    assert {item.action for item in again.items} == {"keep"}
    assert (again.freed_bytes, run_log(store).refresh()) == (0, before)


def test_a_dry_run_says_what_a_sweep_then_does_and_changes_nothing(store: ObjectStore) -> None:
    everything_at_once(store)
    before = {key: store.size(key) for key in [*store.keys("runs"), *store.keys("models")]}
    promised = swept(store, dry_run=True)
    assert {key: store.size(key) for key in [*store.keys("runs"), *store.keys("models")]} == before
    done = swept(store)
    assert [(item.key, item.action, item.bytes) for item in promised.items] == [
        (item.key, item.action, item.bytes) for item in done.items
    ]


def test_the_freed_bytes_are_the_bytes_that_are_gone(store: ObjectStore) -> None:
    everything_at_once(store)
    before = sum(store.size(key) or 0 for key in store.keys(CHECKPOINTS))
    report = swept(store)
    assert report.freed_bytes == before - sum(store.size(key) or 0 for key in store.keys(CHECKPOINTS))


def test_everything_in_the_folder_goes_not_only_what_the_manifest_names(store: ObjectStore) -> None:
    laid_out(store, 10, 20, 30)
    store.write(f"{prefix_of(10)}/weights-00001-of-00009.safetensors", b"from a first try")
    swept(store)
    assert store.keys(prefix_of(10)) == []


def test_the_manifest_goes_last() -> None:
    inner = MemoryStore("test")
    run_with_commits(inner, 10, 20, 30)
    counting = FaultyStore(inner)
    deleted: list[str] = []
    delete = inner.delete
    inner.delete = lambda key: (deleted.append(key), delete(key))[1]  # type: ignore[method-assign]
    swept(counting)  # type: ignore[arg-type]
    assert deleted[-1] == f"{prefix_of(10)}/manifest.json" and len(deleted) == counting.operations.count("delete")


def condemn(log: RunLog, step: int, found: str = "sha256 is 0") -> str:
    """Quarantine a checkpoint on evidence; returns the object that is said to be damaged."""
    key = f"{prefix_of(step)}/trainer.json"
    evidence = (ReadEvidence(key=key, expected="1", found=found, reads=3, host="sick"),)
    quarantine_checkpoint(log, committed_at(log, step), "flipped", evidence=evidence, writer=writer())
    return key


def test_a_quarantined_checkpoint_goes_once_enough_newer_ones_can_be_read(store: ObjectStore) -> None:
    log = laid_out(store, 10, 20, 30)
    quarantine_checkpoint(log, committed_at(log, 10), "a spike", writer=writer())
    swept(store)
    assert folders(store) == [20, 30]


def test_a_quarantined_checkpoint_that_verifies_is_taken_back_by_whoever_would_delete_it(store: ObjectStore) -> None:
    log = laid_out(store, 10, 20, 30)
    condemn(log, 10)
    swept(store)
    record = log.refresh().find(prefix_of(10))
    assert record is not None and record.state == "committed" and "verified on host" in record.detail
    assert folders(store) == [10, 20, 30]


def test_a_quarantined_checkpoint_is_deleted_when_a_fresh_look_fails_as_the_first_did(store: ObjectStore) -> None:
    log = laid_out(store, 10, 20, 30)
    store.write(condemn(log, 10), b"spoiled")
    swept(store)
    assert folders(store) == [20, 30]


def test_a_quarantined_checkpoint_that_fails_in_another_way_is_kept(store: ObjectStore) -> None:
    log = laid_out(store, 10, 20, 30)
    store.write(condemn(log, 10, found="cannot be read: EIO"), b"spoiled")
    swept(store)
    assert folders(store) == [10, 20, 30]


def test_the_live_attempts_staged_folder_is_not_touched_until_it_ends(store: ObjectStore) -> None:
    log = run_with_commits(store, 10)
    staged = stage(store, step=20, attempt=1)
    swept(store)
    commit(log, staged)
    stage(store, step=30, attempt=1)
    log.append(lambda state: ended(1), writer=writer())
    swept(store)
    assert folders(store) == [10, 20]
    check_invariants(store, {prefix_of(10), prefix_of(20)})


def test_the_champion_survives_any_number_of_commits_and_a_rollback_finds_the_one_before(store: ObjectStore) -> None:
    log = run_with_commits(store, 10)
    first = promote(log, 10, loss=3.0)
    for step in (20, 30):
        commit(log, stage(store, step=step, attempt=1))
        swept(store)
    second = promote(log, 30, loss=2.0)
    for step in (40, 50):
        commit(log, stage(store, step=step, attempt=1))
        swept(store)
    body = RolledBack(alias="champion", manifest_sha256=first.manifest_sha256, by="a test", why="")
    Registry(store, "champion").append(lambda state: body)
    swept(store)
    assert verify_checkpoint(store, first) == () and verify_checkpoint(store, second) != ()
    assert folders(store) == [10, 40, 50]


def test_a_hold_that_comes_between_plan_and_superseding_saves_the_checkpoint(store: ObjectStore) -> None:
    log = laid_out(store, 10, 20, 30)
    terms = RetentionTerms(policy=KEEP_TWO, suite_sha256="s")
    late = [partial(pin, run_log(store), 10, "late")]

    def plan(state: RunState, listed: Any) -> Any:
        found = plan_retention(terms, state, listed)
        if found.checkpoints and any(verdict.is_over for verdict in found.checkpoints) and late:
            take = late.pop()
            take.args[0].refresh()
            take()
        return found

    report = sweep(log, plan, writer=writer())
    assert folders(store) == [10, 20, 30]
    assert [item.why for item in report.items if item.step == 10] == ["pinned by an evaluation on host here (pid 1)"]


def test_a_superseding_that_lost_its_number_to_an_evaluation_is_decided_again(store: ObjectStore) -> None:
    log = laid_out(store, 10, 20, 30)
    log.append(lambda state: measured(state, 20, 2.0), writer=writer())
    rival, create = run_log(store), store.create

    def overtaken(key: str, data: bytes) -> bool:
        store.create = create  # type: ignore[method-assign]
        rival.append(lambda state: measured(state, 10, 1.0), writer=writer())
        return create(key, data)

    store.create = overtaken  # type: ignore[method-assign]
    report = swept(store, policy=CheckpointConfig(keep_last=1, keep_best=1))
    assert [item.why for item in report.items if item.step == 10] == ["best 1 (val_loss 1)"]
    assert folders(store) == [10, 20, 30]


def measured(state: RunState, step: int, loss: float) -> object:
    """Return the evaluation of a checkpoint."""
    record = state.find(prefix_of(step))
    return evaluated(step, loss, manifest_sha256=record.committed.manifest_sha256 if record else "")


def test_what_another_sweep_deletes_meanwhile_is_not_deleted_again(store: ObjectStore) -> None:
    laid_out(store, 10, 20, 30)
    create, rivals = store.create, list[SweepReport]()

    def overtaken(key: str, data: bytes) -> bool:
        created = create(key, data)
        if b"checkpoint-superseded" in data and not rivals:
            store.create = create  # type: ignore[method-assign]
            rivals.append(swept(store))
        return created

    store.create = overtaken  # type: ignore[method-assign]
    reports = [swept(store), *rivals]
    deleted = [[item.step for item in report.items if item.action == "delete"] for report in reports]
    assert (deleted, folders(store)) == ([[], [10]], [20, 30])


def test_bytes_that_arrive_after_the_deletion_go_with_the_next_sweep(store: ObjectStore) -> None:
    laid_out(store, 10, 20, 30)
    swept(store)
    store.write(f"{prefix_of(10)}/trainer.json", b"a late request")
    swept(store)
    assert folders(store) == [20, 30]


@pytest.mark.unsound_log
def test_an_alias_that_cannot_be_read_keeps_everything(store: ObjectStore) -> None:
    everything_at_once(store)
    before = store.keys("runs")
    (key,) = store.keys("models/champion/log")
    store.write(key, b"{}")
    with pytest.raises(IntegrityError, match="alias champion cannot be read, so nothing of run r1 is superseded"):
        swept(store)
    assert store.keys("runs") == before


def test_what_a_dead_offerer_still_had_on_its_way_comes_too_late(store: ObjectStore) -> None:
    log = laid_out(store, 10, 20, 30)
    pin(log, 10, "dead-offer", pid=DEAD_PID, alias="champion")
    entries = EntryLog(store=store, prefix="models/champion/log", kinds=MODEL_KINDS, clock=clock, sleep=no_sleep)
    head = newest_entry(entries)
    swept(store)
    late = promoted(10, prefix=prefix_of(10), pin_id="dead-offer")
    assert entries.append(late, after=head, writer=writer()) is None
    assert [refused.gate for refused in refusals(Registry(store, "champion").refresh())] == ["abandoned"]


def test_two_sweeps_at_once_end_where_one_does(store: ObjectStore) -> None:
    everything_at_once(store)
    barrier, problems = threading.Barrier(3), list[BaseException]()

    def run() -> None:
        barrier.wait()
        try:
            swept(store)
        except StorageError as error:
            problems.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert folders(store) == [20, 30, 50, 60, 80]
    assert states(check_invariants(store, set()))[10] == "deleted"


def test_sweeps_beside_a_training_attempt_lose_none_of_its_newest_commits(store: ObjectStore) -> None:
    log = run_with_commits(store, 1)
    done, problems = threading.Event(), list[BaseException]()

    def sweeps() -> None:
        while not done.is_set():
            try:
                swept(store)
            except StorageError as error:
                problems.append(error)
                return

    thread = threading.Thread(target=sweeps)
    thread.start()
    for step in range(2, 8):
        commit(log, stage(store, step=step, attempt=1))
    done.set()
    thread.join()
    swept(store)
    assert problems == []
    assert folders(store) == [6, 7]
    check_invariants(store, {prefix_of(step) for step in range(1, 8)})


def copied(base: MemoryStore) -> MemoryStore:
    copy = MemoryStore("copy")
    copy_objects(base, copy)
    return copy


def cases(base: MemoryStore, fault: Fault, *, share: int = 1) -> Iterator[tuple[MemoryStore, FaultyStore]]:
    """Fail a sweep at one in so many of its operations in turn, for other faults at others; yields what it left."""
    for at in count(list(Fault).index(fault) % share, share):
        survivor = copied(base)
        faulty = FaultyStore(survivor, fault, at)
        with suppress(StorageError, Death):
            swept(faulty)  # type: ignore[arg-type]
        if not faulty.fired:
            return
        yield survivor, faulty


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read entries one after the other: so quick a store needs no threads."""
    monkeypatch.setattr("cairn.storage.stores.object_store.ThreadPoolExecutor", InlineExecutor)


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
def test_a_sweep_that_fails_anywhere_and_is_run_again_ends_where_one_that_did_not_fail_ends(
    fault: Fault, record_property: Callable[[str, object], None]
) -> None:
    base = made_of_everything()
    whole = copied(base)
    swept(whole)
    expected = (states(run_log(whole).refresh()), whole.keys(CHECKPOINTS), len(run_log(whole).refresh().pins))
    number = 0
    for survivor, faulty in cases(base, fault, share=share_of(12)):
        number += 1
        swept(survivor)
        state = check_invariants(survivor, set())
        found = (states(state), survivor.keys(CHECKPOINTS), len(state.pins))
        assert found == expected, faulty.operations
    record_property("cases", number)
    assert number > 40 // share_of(12) or fault is Fault.TORN_VISIBLE


@pytest.mark.usefixtures("no_threads")
def test_two_deaths_in_a_row_leave_a_sweep_that_completes() -> None:
    base = MemoryStore("base")
    run_with_commits(base, 10, 20, 30)
    for first, _ in cases(base, Fault.DEATH_AFTER, share=share_of(16)):
        for second, _ in cases(first, Fault.DEATH_BEFORE):
            swept(second)
            assert states(check_invariants(second, set()))[10] == "deleted"
            assert folders(second) == [20, 30]


def leave_unfinished(
    root: Path, prefix: str, *, days: float = 0.0, name: str = "weights-00001-of-00001.safetensors"
) -> Path:
    """A temporary file as a killed writer leaves it."""
    path = root / "store" / prefix / f".{name}.0123"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    os.utime(path, (time.time(), time.time() - days * 86_400))
    return path


@pytest.mark.parametrize(
    ("folder", "days", "stays"),
    [
        pytest.param(prefix_of(10), 0.0, False, id="of a superseded checkpoint"),
        pytest.param(prefix_of(40, 1), 0.0, False, id="of an ended attempt"),
        pytest.param(prefix_of(40, 2), 2.0, True, id="of the live attempt, however old"),
        pytest.param(prefix_of(40, 3), 2.0, True, id="of an attempt the log does not know yet"),
        pytest.param(f"runs/{RUN}/log", 0.0, True, id="of the log, new"),
        pytest.param(f"runs/{RUN}/log", 2.0, False, id="of the log, two days old"),
        pytest.param("index/runs", 0.0, True, id="of the index of runs, new"),
        pytest.param("index/runs", 2.0, False, id="of the index of runs, two days old"),
    ],
)
def test_what_dead_writers_left_unfinished_goes_and_what_may_be_alive_stays(
    tmp_path: Path, folder: str, days: float, stays: bool
) -> None:
    store = LocalStore(tmp_path / "store")
    claim(run_with_commits(store, 10, 20, 30))
    path = leave_unfinished(tmp_path, folder, days=days)
    report = swept(store)
    assert path.exists() is stays
    assert [item.action for item in report.items if item.kind == "unfinished"] == ["keep" if stays else "discard"]


@pytest.mark.parametrize(
    ("key", "stays"),
    [
        pytest.param(f"log/{entry_name(0)}", False, id="an entry whose number is taken"),
        pytest.param(f"log/{entry_name(1000)}", True, id="an entry that may still be written"),
        pytest.param("heartbeats/attempt-0001.json", False, id="a heartbeat of an ended attempt"),
        pytest.param("heartbeats/attempt-0002.json", True, id="a heartbeat of the live attempt"),
        pytest.param("heartbeats/attempt-0003.json", True, id="a heartbeat of an attempt the log does not know yet"),
    ],
)
def test_what_a_killed_writer_left_of_an_entry_or_a_heartbeat_goes_as_soon_as_it_is_of_no_use(
    tmp_path: Path, key: str, stays: bool
) -> None:
    store = LocalStore(tmp_path / "store")
    claim(run_with_commits(store, 10, 20, 30))
    folder, _, name = f"runs/{RUN}/{key}".rpartition("/")
    path = leave_unfinished(tmp_path, folder, name=name)
    swept(store)
    assert path.exists() is stays


def test_nothing_of_a_deleted_checkpoint_is_left_on_disk(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    run_with_commits(store, 10, 20, 30)
    leave_unfinished(tmp_path, prefix_of(10))
    swept(store)
    assert not (tmp_path / "store" / prefix_of(10)).exists()
