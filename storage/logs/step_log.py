"""The step records of an attempt: JSON lines, for curves only. Nothing is decided by them.

On a local store the lines are appended in the store itself, elsewhere to a spool file that is uploaded after each
segment.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec

from storage.errors import ObjectMissing
from storage.logs.run_state import AttemptRecord
from storage.stores.object_store import ObjectStore

MOST_STEP_LOG_BYTES = 2 * 1024**3
"""About ten million steps of one attempt; such a file is read whole."""
_MOST_TAIL_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One completed step, as it is stored, sent to the parent and exported: 1-based, losses in nats per token."""

    step: int
    attempt: int
    train_loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    mfu: float
    memory_bytes: int
    seconds: float
    probe_loss: float | None
    sample: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPoint:
    """One surviving step, and how many times earlier attempts, whose work was lost, trained it."""

    record: StepRecord
    replays: int


def splice(records: Iterable[StepRecord], attempts: Sequence[AttemptRecord]) -> tuple[StepPoint, ...]:
    """Return the surviving steps of a run in order, each once, from the records of all its attempts.

    The records of an attempt survive up to the step from which a later attempt resumed; later steps were trained again.
    """
    of_attempt: dict[int, dict[int, StepRecord]] = {}
    trained = Counter[int]()
    for record in records:
        mine = of_attempt.setdefault(record.attempt, {})
        trained[record.step] += record.step not in mine
        mine.setdefault(record.step, record)
    surviving: list[StepRecord] = []
    bound: float = float("inf")
    for attempt in reversed(attempts):
        first = attempt.started.first_step
        mine = of_attempt.get(attempt.started.attempt, {})
        surviving += (record for step, record in mine.items() if first < step <= bound)
        bound = min(bound, first)
    points = (StepPoint(record=record, replays=trained[record.step] - 1) for record in surviving)
    return tuple(sorted(points, key=lambda point: point.record.step))


class StepLog:
    """The step records of one attempt, open for appending."""

    def __init__(self, store: ObjectStore, run_prefix: str, attempt: int, *, spool_dir: Path) -> None:
        """Open the file for the lines and make its folder; a symbolic link in its place is refused."""
        self._store = store
        self._key = step_log_key(run_prefix, attempt)
        local = store.local_path(self._key)
        self._is_spool = local is None
        self.path = local or spool_dir / f"attempt-{attempt:04d}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = open(self.path, "a", encoding="utf-8", buffering=1, opener=_open_0664)  # noqa: SIM115

    def write(self, record: StepRecord) -> None:
        """Append one record and hand it to the operating system."""
        self._file.write(msgspec.json.encode(record, order="sorted").decode() + "\n")

    def publish(self) -> None:
        """Upload the spool file, if there is one."""
        if self._is_spool:
            self._file.flush()
            self._store.write(self._key, self.path.read_bytes())


class StepTail:
    """Reads the step records of a run's attempts as they grow, each from where the last read stopped."""

    def __init__(self, store: ObjectStore, run_prefix: str, *, most_bytes: int = _MOST_TAIL_BYTES) -> None:
        """Start at the beginning of every attempt; one `read` takes at most `most_bytes`."""
        self._store, self._prefix, self._most_bytes = store, run_prefix, most_bytes
        self._offsets: dict[int, int] = {}

    def read(self, attempt: int) -> list[StepRecord]:
        """Return the attempt's new records; an incomplete last line waits for the next call."""
        offset = self._offsets.get(attempt, 0)
        data = self._read_from(step_log_key(self._prefix, attempt), offset)
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[attempt] = offset + len(whole)
        return list(parse_step_records(whole))

    def _read_from(self, key: str, offset: int) -> bytes:
        size = self._store.size(key)
        if size is None or size <= offset:
            return b""
        path = self._store.local_path(key)
        if path is None:  # a remote object is read whole: it changes only when a segment ends
            return _read(self._store, key)[offset : offset + self._most_bytes]
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(self._most_bytes)


def step_log_key(run_prefix: str, attempt: int) -> str:
    """Return the key of an attempt's step records."""
    return f"{run_prefix}/steps/attempt-{attempt:04d}.jsonl"


def read_step_records(store: ObjectStore, run_prefix: str) -> list[StepRecord]:
    """Return every attempt's records in attempt order, without malformed lines."""
    return [record for key in store.keys(f"{run_prefix}/steps") for record in parse_step_records(_read(store, key))]


def read_attempt_records(store: ObjectStore, run_prefix: str, attempt: int) -> list[StepRecord]:
    """Return one attempt's records, none if it left none, without malformed lines."""
    try:
        return list(parse_step_records(_read(store, step_log_key(run_prefix, attempt))))
    except ObjectMissing:
        return []


def parse_step_records(data: bytes) -> Iterator[StepRecord]:
    """Yield the records in these lines, without malformed ones."""
    for raw in data.splitlines():
        try:
            yield msgspec.json.decode(raw, type=StepRecord)
        except (msgspec.DecodeError, RecursionError):
            continue


def _open_0664(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o664)


def _read(store: ObjectStore, key: str) -> bytes:
    return store.read(key, at_most_bytes=MOST_STEP_LOG_BYTES)
