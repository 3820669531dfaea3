"""Files of an attempt beside the log: step records as JSON lines, for curves, and its heartbeat, for liveness.

Nothing is decided by the records. A local store gets the lines themselves, another one an object after each segment,
named by the bytes before it. The names have the claim's id: no other run of this name has them. No clock is trusted.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from cairn.storage.errors import IntegrityError, ObjectMissing
from cairn.storage.logs import log_entry
from cairn.storage.logs.run_state import AttemptRecord
from cairn.storage.stores import codec, local_disk
from cairn.storage.stores.object_store import ObjectStore, ask_each

MOST_STEP_LOG_BYTES = 2 * 1024**3
"""About ten million steps of one attempt; such a file is read whole."""
_MOST_TAIL_BYTES = 4 * 1024 * 1024
_MOST_NEWEST_BYTES = 512 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One completed step, as it is stored, sent to the parent and exported: 1-based, losses in nats per token.

    `grad_norm` is None where it was not finite: the update of an fp16 step was skipped, and its loss scale lowered.
    `at` is the writer's clock, `tokens` counts from the first step, of a fork from its parent's, `epoch` is how often
    the data was drawn by then, `data_seconds` what the step waited for its batch, `loss_scale` is that of fp16,
    `weights_digest` is over the bits of all weights after the step (None where they are sharded): what `cairn replay`
    compares. Of several ranks, `slowest_rank` worked by itself for longest before it waited for the others, and the
    median rank for so long; on a GPU these are the times of an earlier step. About once a second it has the resident
    memory of the first rank's process and the free bytes of the disk of its records.
    """

    step: int
    attempt: int
    train_loss: float
    lr: float
    grad_norm: float | None
    tokens_per_second: float
    mfu: float
    memory_bytes: int
    seconds: float
    probe_loss: float | None
    sample: str | None
    at: datetime | None = None
    tokens: int | None = None
    epoch: float | None = None
    data_seconds: float = 0.0
    loss_scale: float | None = None
    weights_digest: str | None = None
    world_size: int = 1
    slowest_rank: int | None = None
    slowest_rank_seconds: float | None = None
    median_rank_seconds: float | None = None
    rss_bytes: int | None = None
    disk_free_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPoint:
    """One surviving step, and how many times earlier attempts, whose work was lost, trained it."""

    record: StepRecord
    replays: int


def splice(records: Iterable[StepRecord], attempts: Sequence[AttemptRecord]) -> tuple[StepPoint, ...]:
    """Return every surviving step once, in order: an attempt's records count up to where a later one resumed."""
    of_attempt, trained = dict[int, dict[int, StepRecord]](), Counter[int]()
    for record in records:
        mine = of_attempt.setdefault(record.attempt, {})
        trained[record.step] += record.step not in mine
        mine.setdefault(record.step, record)
    surviving, bound = list[StepRecord](), float("inf")
    for attempt in reversed(attempts):
        first, mine = attempt.started.first_step, of_attempt.get(attempt.started.attempt, {})
        surviving += (record for step, record in mine.items() if first < step <= bound)
        bound = min(bound, first)
    points = (StepPoint(record=record, replays=trained[record.step] - 1) for record in surviving)
    return tuple(sorted(points, key=lambda point: point.record.step))


class StepLog:
    """The step records of one attempt, open for appending."""

    def __init__(
        self, store: ObjectStore, run_prefix: str, attempt: int, claim_id: str = "", *, spool_dir: Path
    ) -> None:
        """Open the file for the lines, a spool empty, and make its folder; a symbolic link in its place is refused."""
        self._store, self._key, self._published_bytes = store, step_log_key(run_prefix, attempt, claim_id), 0
        local = store.local_path(self._key)
        self._is_spool = local is None
        self.path, mode = (spool_dir / self._key.rpartition("/")[2], "w") if local is None else (local, "a")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, f"{mode}b", buffering=0, opener=local_disk.open_0664)  # noqa: SIM115
        self._held = b""  # what a full disk had no room for

    def write(self, record: StepRecord) -> None:
        """Append one record and hand it to the operating system; a full disk gets it with a later one."""
        line = msgspec.json.encode(record, order="sorted") + b"\n"
        self._held = local_disk.write_what_fits(self._file, self._held + line)

    def publish(self) -> None:
        """Upload the lines that the spool file, if there is one, got since the last call; a failed call is repeated."""
        if not self._is_spool:
            return
        with self.path.open("rb") as file:
            file.seek(self._published_bytes)
            lines = file.read()
        if lines:
            self._store.write(_piece_key(self._key, self._published_bytes), lines)
            self._published_bytes += len(lines)


class StepTail:
    """Reads the step records of a run's attempts as they grow, each from where the last read stopped."""

    def __init__(self, store: ObjectStore, run_prefix: str, *, most_bytes: int = _MOST_TAIL_BYTES) -> None:
        """Start at the beginning of every attempt; one `read` takes at most `most_bytes`."""
        self._store, self._prefix, self._most_bytes = store, run_prefix, most_bytes
        self._places: dict[str, tuple[int, int]] = {}

    def read(self, attempt: int, claim_id: str = "") -> list[StepRecord]:
        """Return the attempt's new records; an incomplete last line waits for the next call."""
        key, found = step_log_key(self._prefix, attempt, claim_id), bytearray()
        while True:  # the next whole lines of one object after the other
            object_key, size, start, offset = self._find(key, *self._places.get(key, (0, 0)))
            into = memoryview(bytearray(max(0, min(size - offset, self._most_bytes - len(found)))))
            data = bytes(into[: self._store.read_range(object_key, offset, into)]) if into else b""
            lines = data[: data.rfind(b"\n") + 1]
            self._places[key] = start, offset + len(lines)
            if not lines:
                return records_of(attempt, bytes(found))
            found += lines

    def _find(self, key: str, start: int, offset: int) -> tuple[str, int, int, int]:
        """Return the object to read on, its size, the number of bytes before it, and how many of its own are read."""
        if (size := self._store.size(key)) is not None:
            return key, size, start, offset
        size = self._store.size(_piece_key(key, start)) or 0
        if offset < size or not size:  # also of one that was read whole, and was written again with more
            return _piece_key(key, start), size, start, offset
        following = self._store.size(_piece_key(key, start + size))
        place = (start, offset) if following is None else (start + size, 0)
        return _piece_key(key, place[0]), following or size, *place


class SurvivingSteps:
    """Reads every surviving step of a run once and in order, on from the last one, in little memory.

    An attempt's records count up to where a later one resumed, as in `splice`.
    """

    def __init__(self, store: ObjectStore, run_prefix: str) -> None:
        """Read nothing yet."""
        self._tail, self._position, self.last_step = StepTail(store, run_prefix), 0, 0
        self._ahead = deque[StepRecord]()

    def is_current(self, attempts: Sequence[AttemptRecord]) -> bool:
        """Whether every step that was read survives."""
        return all(later.started.first_step >= self.last_step for later in attempts[self._position + 1 :])

    def read(self, attempts: Sequence[AttemptRecord], until_step: float) -> Iterator[StepRecord]:
        """Yield the records up to a step that are not read yet; raises as the store does."""
        while self._position < len(attempts):
            started, later = attempts[self._position].started, attempts[self._position + 1 :]
            bound = min((item.started.first_step for item in later), default=math.inf)
            if not self._ahead:
                self._ahead.extend(self._tail.read(started.attempt, started.claim_id))
            if not self._ahead and not later:
                return
            self._position += not self._ahead
            while self._ahead and not until_step < self._ahead[0].step <= bound:
                record = self._ahead.popleft()
                if max(self.last_step, started.first_step) < record.step <= bound:
                    self.last_step = record.step
                    yield record
            if self._ahead:
                return


class StepSample:
    """The step records of a run's attempts for a drawing: all of a short run, every n-th step of a long one."""

    def __init__(self, store: ObjectStore, run_prefix: str, *, most_records: int = 20_000) -> None:
        """Read nothing yet; keep at most `most_records`, and the newest one."""
        self._tail, self._position, self._every = StepTail(store, run_prefix), 0, 1
        self._most_records, self._records, self._newest = most_records, list[StepRecord](), list[StepRecord]()

    def read(self, attempts: Sequence[AttemptRecord]) -> list[StepRecord]:
        """Read on and return the records, in the order of the attempts."""
        for attempt in attempts[self._position :]:
            while fresh := self._tail.read(attempt.started.attempt, attempt.started.claim_id):
                self._records, self._newest = [*self._records, *self._nth(fresh)], fresh[-1:]
                while len(self._records) > self._most_records:
                    self._every *= 2
                    self._records = self._nth(self._records)
        self._position = max(len(attempts) - 1, 0)
        return [*self._records, *(record for record in self._newest if record.step % self._every)]

    def _nth(self, records: list[StepRecord]) -> list[StepRecord]:
        return [record for record in records if record.step % self._every == 0]


def step_log_key(run_prefix: str, attempt: int, claim_id: str = "") -> str:
    """Return the key of an attempt's step records on a local store; elsewhere they lie in a folder of this name."""
    return f"{run_prefix}/steps/{_file_name(attempt, claim_id)}.jsonl"


def read_step_records(store: ObjectStore, run_prefix: str, attempts: Iterable[AttemptRecord]) -> list[StepRecord]:
    """Return the records of these attempts in their order, without malformed lines and those of any other attempt."""
    started, folder = (item.started for item in attempts), f"{run_prefix}/steps"
    own = {_file_name(item.attempt, item.claim_id): item.attempt for item in started}
    names = ((key.removeprefix(f"{folder}/").split("/")[0].removesuffix(".jsonl"), key) for key in store.keys(folder))
    keys = [(own[name], key) for name, key in names if name in own]
    data = ask_each(store, partial(store.read, at_most_bytes=MOST_STEP_LOG_BYTES), [key for _, key in keys])
    return [record for (attempt, _), lines in zip(keys, data, strict=True) for record in records_of(attempt, lines)]


def read_newest_records(store: ObjectStore, run_prefix: str, attempt: int, claim_id: str = "") -> list[StepRecord]:
    """Return the attempt's newest whole records, some hundreds of them, or those of its last object."""
    pieces, end = _pieces(store, step_log_key(run_prefix, attempt, claim_id))
    if not pieces:
        return []
    key, size = pieces[-1][1], end - pieces[-1][0]
    into = memoryview(bytearray(min(size, _MOST_NEWEST_BYTES)))
    return records_of(attempt, bytes(into[: store.read_range(key, size - len(into), into)]) if into else b"")


def read_last_record(store: ObjectStore, run_prefix: str, attempt: int, claim_id: str = "") -> StepRecord | None:
    """Return the attempt's newest whole record, None if it left none."""
    return next(reversed(read_newest_records(store, run_prefix, attempt, claim_id)), None)


def step_log_bytes(store: ObjectStore, run_prefix: str, attempt: int, claim_id: str = "") -> int:
    """Return the size of an attempt's records, which grows with each of them."""
    return _pieces(store, step_log_key(run_prefix, attempt, claim_id))[1]


def records_of(attempt: int, data: bytes) -> list[StepRecord]:
    """Return the attempt's records in these lines, without malformed ones."""
    records = list[StepRecord]()
    for raw in data.splitlines():
        with suppress(msgspec.DecodeError, RecursionError):
            records.append(msgspec.json.decode(raw, type=StepRecord))
    return [record for record in records if record.attempt == attempt]


def _file_name(attempt: int, claim_id: str) -> str:
    is_name = claim_id.isascii() and claim_id.isalnum()  # a log may say anything
    return f"attempt-{attempt:04d}-{claim_id}" if is_name else f"attempt-{attempt:04d}"


def _piece_key(key: str, start: int) -> str:
    return f"{key.removesuffix('.jsonl')}/{start:016d}.jsonl"


def _pieces(store: ObjectStore, key: str) -> tuple[list[tuple[int, str]], int]:
    """Return the objects of a step log with the number of bytes before each, and of all bytes."""
    if (size := store.size(key)) is not None:
        return [(0, key)], size
    starts = ((item.rpartition("/")[2].removesuffix(".jsonl"), item) for item in store.keys(key.removesuffix(".jsonl")))
    pieces = [(int(start), item) for start, item in starts if start.isdecimal()]
    return pieces, pieces[-1][0] + (store.size(pieces[-1][1]) or 0) if pieces else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """The progress of an attempt; `beat` rises with every write, `tokens` and `gpu_seconds` count from its start.

    `at` is the writer's clock, for accounts only; the speed is that of its step. `symptom` says what is wrong with the
    training now, if anything; `claim_id` is that of `AttemptStarted`.
    """

    attempt: int
    beat: int
    step: int
    train_loss: float | None
    tokens: int
    gpu_seconds: float
    at: datetime | None = None
    peak: log_entry.DevicePeak | None = None
    arithmetic: log_entry.Arithmetic | None = None
    starting_seconds: float | None = None
    symptom: str = ""
    claim_id: str = ""
    tokens_per_second: float | None = None


def heartbeat_key(run_prefix: str, attempt: int) -> str:
    """Return the key of an attempt's heartbeat."""
    return f"{run_prefix}/heartbeats/attempt-{attempt:04d}.json"


def write_heartbeat(store: ObjectStore, run_prefix: str, heartbeat: Heartbeat) -> None:
    """Rewrite the attempt's heartbeat."""
    store.write(heartbeat_key(run_prefix, heartbeat.attempt), codec.encode(heartbeat))


def silent_seconds(store: ObjectStore, run_prefix: str, attempt: int) -> float | None:
    """Return for how long the attempt has written no heartbeat, by the store's clock; None if that is not known."""
    return store.age_seconds(heartbeat_key(run_prefix, attempt))


def read_heartbeat(store: ObjectStore, run_prefix: str, attempt: int, claim_id: str = "") -> Heartbeat | None:
    """Return the attempt's last heartbeat, or None if it is missing, unreadable or of another claim than this one."""
    with suppress(ObjectMissing, IntegrityError):
        beat = codec.decode(store.read(key := heartbeat_key(run_prefix, attempt)), Heartbeat, where=key)
        return beat if claim_id in ("", beat.claim_id) else None
    return None
