"""Many at once: one winner per create, one entry per number, nothing acknowledged is lost."""

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cairn.storage.logs.log_entry import Writer
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from tests.entries import evaluated, started, writer
from tests.processes.waiting import patience_seconds
from tests.storage.builders import check_invariants, entry_log, newest_entry, open_run, run_log

THREADS = 32
ROUNDS, WRITERS = 4, 8


def at_once(number: int, work: Callable[[int], object]) -> list[object]:
    """Run `work` in that many threads, released together."""
    barrier = threading.Barrier(number)

    def released(index: int) -> object:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(released, range(number)))


def test_of_32_creators_exactly_one_wins_in_every_round(store: ObjectStore) -> None:
    for number in range(ROUNDS):
        key = f"race/{number}"
        won = at_once(THREADS, lambda index, key=key: store.create(key, b"%d" % index))  # type: ignore[misc]
        assert won.count(True) == 1
        assert store.read(key) == b"%d" % won.index(True)


def test_threads_that_append_at_once_leave_one_contiguous_log_with_every_acknowledged_entry(
    store: ObjectStore,
) -> None:
    open_run(store)
    at_once(WRITERS, lambda index: run_log(store).append(lambda state: evaluated(index, 1.0), writer=writer()))
    state = check_invariants(store, set())
    assert sorted(evaluation.step for evaluation in state.evaluations) == list(range(WRITERS))


def append_from_a_process(root: Path, first: int, number: int) -> None:
    """Append `number` evaluations; runs in a process of its own."""
    log = run_log(LocalStore(root))
    for step in range(first, first + number):
        log.append(lambda state, step=step: evaluated(step, 1.0), writer=writer())  # type: ignore[misc]


def test_processes_that_append_at_once_leave_one_contiguous_log_with_every_entry(tmp_path: Path) -> None:
    open_run(LocalStore(tmp_path))
    context = multiprocessing.get_context("forkserver")  # imports once for all of them
    context.set_forkserver_preload(["tests.storage.builders"])
    workers = [context.Process(target=append_from_a_process, args=(tmp_path, 10 * n, 8)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(patience_seconds())
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    state = check_invariants(LocalStore(tmp_path), set())
    assert sorted(item.step for item in state.evaluations) == [10 * n + k for n in range(4) for k in range(8)]


def test_of_claimers_of_one_number_exactly_one_gets_it(store: ObjectStore) -> None:
    open_run(store)

    def claim_if_free(index: int) -> bool:
        def decide(state: RunState) -> object:
            return started(state.latest_attempt + 1) if state.open_attempt is None else None

        log = run_log(store)
        log.append(decide, writer=Writer(host="here", pid=index))
        return [entry.writer.pid for entry in log.read_entries() if entry.kind == "attempt-started"] == [index]

    assert at_once(WRITERS, claim_if_free).count(True) == 1
    assert len(check_invariants(store, set()).attempts) == 1


def test_of_appends_after_the_same_entry_exactly_one_is_committed(store: ObjectStore) -> None:
    open_run(store)
    head = newest_entry(entry_log(store))
    answers = at_once(WRITERS, lambda index: entry_log(store).append(started(1), after=head, writer=writer()))
    assert sum(answer is not None for answer in answers) == 1


def test_creating_and_deleting_in_one_folder_at_once_fails_nobody(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    def create_and_delete(index: int) -> None:
        for number in range(20):
            assert store.create(f"busy/{index}-{number}", b"x")
            store.delete(f"busy/{index}-{number}")

    at_once(8, create_and_delete)
    assert store.keys("busy") == []
