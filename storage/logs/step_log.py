"""Per-step records of one attempt: JSON lines, flushed line by line.

Where the store is this machine's disk the lines go straight into the store; elsewhere into a spool file that is
published whole whenever a segment ends. These records are for curves; nothing is decided by them. No link is written
through.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec

from storage.errors import ObjectMissing
from storage.stores.object_store import ObjectStore

MOST_STEP_LOG_BYTES = 2 * 1024**3
"""Some ten million steps of one attempt; such a file is read whole."""


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


class StepLog:
    """The step records of one attempt, open for appending."""

    def __init__(self, store: ObjectStore, run_prefix: str, attempt: int, *, spool_dir: Path) -> None:
        """Open the file the lines go to; its folder is made."""
        self._store = store
        self._key = step_log_key(run_prefix, attempt)
        local = store.local_path(self._key)
        self._is_spool = local is None
        self.path = local or spool_dir / f"attempt-{attempt:04d}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = open(self.path, "a", encoding="utf-8", buffering=1, opener=_open_itself)  # noqa: SIM115

    def write(self, record: StepRecord) -> None:
        """Append one record; it is in the operating system's hands when this returns."""
        self._file.write(msgspec.json.encode(record, order="sorted").decode() + "\n")

    def publish(self) -> None:
        """Upload the spool where the store is elsewhere."""
        if self._is_spool:
            self._file.flush()
            self._store.write(self._key, self.path.read_bytes())


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o664)


def step_log_key(run_prefix: str, attempt: int) -> str:
    """Return the key of an attempt's step records."""
    return f"{run_prefix}/steps/attempt-{attempt:04d}.jsonl"


def read_step_records(store: ObjectStore, run_prefix: str) -> list[StepRecord]:
    """Return every attempt's records in attempt order; a line torn by a crash is left out."""
    return [record for key in store.keys(f"{run_prefix}/steps") for record in parse_step_records(_read(store, key))]


def read_attempt_records(store: ObjectStore, run_prefix: str, attempt: int) -> list[StepRecord]:
    """Return one attempt's records, none where it left none; a line torn by a crash is left out."""
    try:
        return list(parse_step_records(_read(store, step_log_key(run_prefix, attempt))))
    except ObjectMissing:
        return []


def _read(store: ObjectStore, key: str) -> bytes:
    return store.read(key, at_most_bytes=MOST_STEP_LOG_BYTES)


def parse_step_records(data: bytes) -> Iterator[StepRecord]:
    """Yield the records among these lines; what is none is left out."""
    for raw in data.splitlines():
        try:
            yield msgspec.json.decode(raw, type=StepRecord)
        except (msgspec.DecodeError, RecursionError):
            continue
