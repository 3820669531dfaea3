import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from cairn.storage.errors import StoreUnavailable
from cairn.storage.logs.run_state import AttemptRecord
from cairn.storage.logs.step_log import (
    Heartbeat,
    StepLog,
    StepRecord,
    StepSample,
    StepTail,
    heartbeat_key,
    read_heartbeat,
    read_last_record,
    read_newest_records,
    read_step_records,
    records_of,
    step_log_bytes,
    step_log_key,
    write_heartbeat,
)
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from tests.entries import NOON, started, step_record
from tests.memory_store import MemoryStore
from tests.storage.faulty_store import FaultyStore

RUN = "runs/bard"


def encoded(*steps: int, attempt: int = 1) -> bytes:
    return b"".join(msgspec.json.encode(step_record(step, attempt)) + b"\n" for step in steps)


@pytest.fixture(params=["local", "elsewhere"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return LocalStore(tmp_path) if request.param == "local" else MemoryStore("tail")


def attempts(claim_id: str = "") -> list[AttemptRecord]:
    return [AttemptRecord(started=started(1, claim_id=claim_id), started_at=NOON)]


def steps(lines: list[StepRecord]) -> list[int]:
    return [line.step for line in lines]


def test_each_record_is_read_once_as_the_file_grows(store: ObjectStore) -> None:
    tail = StepTail(store, RUN)
    assert tail.read(1) == []
    store.write(step_log_key(RUN, 1), encoded(1, 2))
    assert steps(tail.read(1)) == [1, 2] and tail.read(1) == []
    store.write(step_log_key(RUN, 1), encoded(1, 2, 3))
    assert steps(tail.read(1)) == [3]


def test_a_line_that_is_still_being_written_waits_until_it_is_whole(store: ObjectStore) -> None:
    tail, whole = StepTail(store, RUN), encoded(1, 2)
    store.write(step_log_key(RUN, 1), whole[:-5])
    assert steps(tail.read(1)) == [1]
    store.write(step_log_key(RUN, 1), whole)
    assert steps(tail.read(1)) == [2]


def test_a_long_file_is_read_piece_by_piece(store: ObjectStore) -> None:
    store.write(step_log_key(RUN, 1), encoded(*range(1, 101)))
    tail, found, looks = StepTail(store, RUN, most_bytes=2000), list[int](), 0
    while piece := tail.read(1):
        found, looks = found + steps(piece), looks + 1
    assert found == list(range(1, 101)) and looks > 5


def test_attempts_are_read_apart(store: ObjectStore) -> None:
    tail = StepTail(store, RUN)
    for attempt, step in ((1, 5), (2, 3)):
        store.write(step_log_key(RUN, attempt), encoded(step, attempt=attempt))
    assert (steps(tail.read(2)), steps(tail.read(1))) == ([3], [5])


def test_one_attempts_records_are_read_whole_and_none_is_no_error(store: ObjectStore) -> None:
    store.write(step_log_key(RUN, 1), encoded(1, 2) + b'{"step": torn')
    store.write(step_log_key(RUN, 2), encoded(3, attempt=2))
    assert steps(read_step_records(store, RUN, attempts())) == [1, 2]
    assert read_step_records(store, RUN, [AttemptRecord(started=started(3), started_at=NOON)]) == []


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[Callable[..., StepLog]]:
    """Open a step log, whose file a trainer leaves open until it exits."""
    with ExitStack() as files:

        def open_log(store: ObjectStore, claim_id: str = "") -> StepLog:
            log = StepLog(store, RUN, 1, claim_id, spool_dir=tmp_path / "spool")
            files.enter_context(log._file)
            return log

        yield open_log


def record(step: int) -> StepRecord:
    return step_record(step, 1)


class FullFile:
    """A file on a full disk: it takes ten bytes, then nothing for two calls, then all."""

    def __init__(self) -> None:
        self.data, self._answers = b"", [10, 0, 0]

    def write(self, data: bytes) -> int:
        room = self._answers.pop(0) if self._answers else len(data)
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.data += data[:room]
        return min(room, len(data))


def test_step_records_that_a_full_disk_did_not_take_are_written_with_a_later_one(
    open_log: Callable[..., StepLog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, full = open_log(LocalStore(tmp_path)), FullFile()
    monkeypatch.setattr(log, "_file", full)
    for step in (1, 2, 3, 4):
        log.write(record(step))
    assert records_of(1, full.data) == [record(step) for step in (1, 2, 3, 4)]


def test_a_remote_store_gets_each_line_once(open_log: Callable[..., StepLog]) -> None:
    sent = list[int]()

    class Noting(MemoryStore):
        def write(self, key: str, data: bytes) -> None:
            sent.append(len(data))
            super().write(key, data)

    log = open_log(Noting())
    for segment in range(20):
        for step in range(10):
            log.write(record(10 * segment + step))
        log.publish()
        log.publish()
    assert sum(sent) == log.path.stat().st_size and len(sent) == 20


def test_the_records_of_all_segments_are_read_as_one(store: ObjectStore, open_log: Callable[..., StepLog]) -> None:
    log, tail, tailed = open_log(store), StepTail(store, RUN), list[int]()
    for first in (1, 4, 7):
        for step in range(first, first + 3):
            log.write(record(step))
        log.publish()
        tailed += steps(tail.read(1))
    every = list(range(1, 10))
    assert tailed == steps(StepTail(store, RUN).read(1)) == steps(read_step_records(store, RUN, attempts())) == every
    assert read_last_record(store, RUN, 1) == record(9)
    assert step_log_bytes(store, RUN, 1) == log.path.stat().st_size


def test_an_upload_that_failed_is_part_of_the_next(open_log: Callable[..., StepLog]) -> None:
    class Away(MemoryStore):
        is_away = True

        def write(self, key: str, data: bytes) -> None:
            if self.is_away:
                raise StoreUnavailable("away")
            super().write(key, data)

    store = Away()
    log = open_log(store)
    log.write(record(1))
    with pytest.raises(StoreUnavailable):
        log.publish()
    store.is_away = False
    log.write(record(2))
    log.publish()
    assert steps(read_step_records(store, RUN, attempts())) == [1, 2]


def test_a_spool_begins_empty(open_log: Callable[..., StepLog]) -> None:
    for step in (1, 2):  # two runs of one name, in two stores
        log = open_log(store := MemoryStore(f"{step}"))
        log.write(record(step))
        log.publish()
        assert steps(read_step_records(store, RUN, attempts())) == [step]


def newest(store: ObjectStore, claim_id: str) -> list[StepRecord]:
    found = read_last_record(store, RUN, 1, claim_id)
    return [found] if found else []


READERS: dict[str, Callable[[ObjectStore, str], list[StepRecord]]] = {
    "all": lambda store, claim_id: read_step_records(store, RUN, attempts(claim_id)),
    "newest": newest,
    "tail": lambda store, claim_id: StepTail(store, RUN).read(1, claim_id),
}
each_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


@each_reader
def test_records_of_another_claim_of_this_attempt_are_not_read(
    store: ObjectStore, open_log: Callable[..., StepLog], read: Callable[[ObjectStore, str], list[StepRecord]]
) -> None:
    for step, claim_id in ((5, "theirs"), (1, "ours"), (6, "")):
        log = open_log(store, claim_id)
        log.write(record(step))
        log.publish()
    assert [steps(read(store, claim_id)) for claim_id in ("ours", "theirs", "", "nobodys")] == [[1], [5], [6], []]


@each_reader
def test_a_record_that_names_another_attempt_is_refused(
    store: ObjectStore, read: Callable[[ObjectStore, str], list[StepRecord]]
) -> None:
    store.write(step_log_key(RUN, 1, "ours"), encoded(1) + encoded(2, attempt=2))
    assert steps(read(store, "ours")) == [1]


def test_an_object_that_is_written_again_with_more_is_read_on() -> None:
    tail, key = StepTail(store := MemoryStore(), RUN), step_log_key(RUN, 1).removesuffix(".jsonl")
    store.write(f"{key}/{0:016d}.jsonl", encoded(1))  # its writer got no answer
    assert steps(tail.read(1)) == [1]
    store.write(f"{key}/{0:016d}.jsonl", encoded(1, 2))
    store.write(f"{key}/{len(encoded(1, 2)):016d}.jsonl", encoded(3))
    assert steps(tail.read(1)) == [2, 3]


def test_reading_on_takes_the_same_requests_however_many_objects_there_are(open_log: Callable[..., StepLog]) -> None:
    log, tail = open_log(store := MemoryStore()), StepTail(counting := FaultyStore(store), RUN)
    requests = set[int]()
    for step in range(1, 50):
        log.write(record(step))
        log.publish()
        before = len(counting.operations)
        assert steps(tail.read(1)) == [step]
        requests.add(len(counting.operations) - before)
    assert max(requests) <= 8


def test_a_sample_of_a_long_run_has_its_newest_step_and_few_others(store: ObjectStore) -> None:
    sample, attempts = StepSample(store, RUN, most_records=100), [AttemptRecord(started=started(1), started_at=NOON)]
    for last in (50, 399, 1001):
        store.write(step_log_key(RUN, 1), encoded(*range(1, last + 1)))
        found = steps(sample.read(attempts))
        assert len(found) <= 101 and found[-1] == last and len({b - a for a, b in pairwise(found[:-1])}) == 1
    assert found == [*range(16, 1001, 16), 1001]


def test_a_sample_of_a_short_run_is_all_of_it(store: ObjectStore) -> None:
    for attempt, numbers in ((1, (1, 2, 3)), (2, (3, 4))):
        store.write(step_log_key(RUN, attempt), encoded(*numbers, attempt=attempt))
    every = [AttemptRecord(started=started(attempt), started_at=NOON) for attempt in (1, 2)]
    assert steps(StepSample(store, RUN).read(every)) == [1, 2, 3, 3, 4]


def test_the_newest_records_are_read_without_the_many_before_them(store: ObjectStore) -> None:
    store.write(step_log_key(RUN, 1), encoded(*range(1, 9_000)) + b'{"step": torn')
    found = steps(read_newest_records(store, RUN, 1))
    assert found == list(range(found[0], 9_000)) and 200 < len(found) < 5_000
    assert read_last_record(store, RUN, 1) == record(8_999)


BEAT = Heartbeat(attempt=1, beat=3, step=7, train_loss=2.5, tokens=70, gpu_seconds=1.5)


def test_a_heartbeat_reads_back_as_written_last(store: ObjectStore) -> None:
    write_heartbeat(store, "runs/r1", Heartbeat(attempt=1, beat=2, step=6, train_loss=None, tokens=60, gpu_seconds=1))
    write_heartbeat(store, "runs/r1", BEAT)
    assert read_heartbeat(store, "runs/r1", 1) == BEAT


def test_attempts_have_heartbeats_of_their_own(store: ObjectStore) -> None:
    write_heartbeat(store, "runs/r1", BEAT)
    assert read_heartbeat(store, "runs/r1", 2) is None


def test_the_heartbeat_of_another_runs_attempt_of_this_number_counts_as_none(store: ObjectStore) -> None:
    write_heartbeat(store, "runs/r1", replace(BEAT, claim_id="theirs"))
    assert read_heartbeat(store, "runs/r1", 1, "ours") is None
    assert read_heartbeat(store, "runs/r1", 1, "theirs") is not None


def test_a_heartbeat_that_cannot_be_read_counts_as_none(store: ObjectStore) -> None:
    store.write(heartbeat_key("runs/r1", 1), b'{"attempt": ')
    assert read_heartbeat(store, "runs/r1", 1) is None


def test_a_loss_that_is_not_a_number_does_not_stop_the_heart(store: ObjectStore) -> None:
    write_heartbeat(
        store, "runs/r1", Heartbeat(attempt=1, beat=1, step=1, train_loss=float("nan"), tokens=1, gpu_seconds=1.0)
    )
    beat = read_heartbeat(store, "runs/r1", 1)
    assert beat is not None
    assert beat.train_loss is None
