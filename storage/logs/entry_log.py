"""An ordered, append-only list of entries in an object store: the only concurrency control there is.

Owns sequence numbers, the prev chain, and the three outcomes of an append: committed, lost the race, unknown
(settled by reading back, never by retrying blindly; compare PyIceberg's commit states). Refuses to know what
entries mean. Used for the run log and for the model registry.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count, takewhile
from typing import Any

from storage.errors import AppendUnknown, IntegrityError, ObjectMissing, StoreUnavailable
from storage.logs.log_entry import Entry, Writer, decode_entry, encode_entry, entry_name, seq_of
from storage.logs.run_entries import CheckpointReference
from storage.stores.document import sha256
from storage.stores.object_store import ObjectStore

_TRIES = 6
_PROBES = 16
_READERS = 16


def utc_now() -> datetime:
    """Return this host's wall clock in UTC; entries carry it for people, nothing is decided by it."""
    return datetime.now(UTC)


def this_writer(*, attempt: int | None = None, flow_run_id: str | None = None) -> Writer:
    """Return this process as the writer of an entry."""
    return Writer(host=socket.gethostname(), pid=os.getpid(), attempt=attempt, flow_run_id=flow_run_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadEntry:
    """An entry as read, with the digest of its bytes, which the next entry must carry as `prev`."""

    entry: Entry
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryLog:
    """The log under `prefix`, whose bodies are the records in `kinds`."""

    store: ObjectStore
    prefix: str
    kinds: Mapping[str, type]
    clock: Callable[[], datetime] = utc_now
    sleep: Callable[[float], None] = time.sleep
    names: Mapping[type, str] = field(init=False)

    def __post_init__(self) -> None:
        """Index the kinds by their record."""
        object.__setattr__(self, "names", {record: kind for kind, record in self.kinds.items()})

    def read(self, seq: int) -> ReadEntry | None:
        """Return entry `seq`, or None where the log ends before it; `IntegrityError` where it is not what it says."""
        key = f"{self.prefix}/{entry_name(seq)}"
        try:
            data = self.store.read(key)
        except ObjectMissing:
            return None
        entry = decode_entry(data, self.kinds, where=key)
        if entry.seq != seq:
            raise IntegrityError(f"{key}: holds seq {entry.seq}, must hold {seq}")
        return ReadEntry(entry=entry, sha256=sha256(data))

    def newest(self) -> ReadEntry | None:
        """Return the newest entry in two requests however long the log is, or None for an empty log."""
        key = self.store.first(self.prefix)
        return None if key is None else self.read(seq_of(key.rsplit("/", 1)[1]))

    def read_after(self, last: ReadEntry | None) -> list[ReadEntry]:
        """Return every entry after `last`, oldest first, with sequence and prev chain checked."""
        return list(self.walk_after(last))

    def walk_after(self, last: ReadEntry | None) -> Iterator[ReadEntry]:
        """Yield every entry after `last`, oldest first; raises `IntegrityError` at the first that cannot be believed.

        Probes forward, so an ordered listing is not needed: the sequence is contiguous and the first absent number is
        the end. When that takes long, the newest name says how far the log reaches at least, and what lies between is
        read by several readers at once.
        """
        for number in count():
            following = self._following(last, ahead=number == _PROBES)
            if not following:
                return
            for read in following:
                self._check_follows(read, last)
                yield read
                last = read

    def _following(self, last: ReadEntry | None, *, ahead: bool) -> list[ReadEntry]:
        seq = 0 if last is None else last.entry.seq + 1
        key = self.store.first(self.prefix) if ahead else None
        newest = seq_of(key.rsplit("/", 1)[1]) if key else seq
        if newest <= seq or self.store.local_path(self.prefix) is not None:
            read = self.read(seq)
            return [] if read is None else [read]
        with ThreadPoolExecutor(_READERS) as readers:
            reads = takewhile(lambda read: read is not None, readers.map(self.read, range(seq, newest + 1)))
            return [read for read in reads if read is not None]

    def _check_follows(self, read: ReadEntry, last: ReadEntry | None) -> None:
        expected = last.sha256 if last else None
        if read.entry.prev != expected:
            raise IntegrityError(
                f"{self.prefix}/{entry_name(read.entry.seq)}: prev is {read.entry.prev}, must be {expected}: "
                "an entry before it was changed"
            )

    def append(
        self, body: Any, *, after: ReadEntry | None, writer: Writer, resume: tuple[CheckpointReference, ...] = ()
    ) -> ReadEntry | None:
        """Try to append `body` right after `after`: the new entry when committed, None when the race was lost.

        Raises `AppendUnknown` when neither could be established: acknowledge nothing and read again later;
        `IntegrityError`, before anything is written, for a body that could not be read back (JSON has no NaN):
        it would make the log unreadable for ever.
        """
        entry = Entry(
            seq=0 if after is None else after.entry.seq + 1,
            kind=self.names[type(body)],
            at=self.clock(),
            write_id=uuid.uuid4().hex,
            prev=None if after is None else after.sha256,
            writer=writer,
            resume=resume,
            body=body,
        )
        data, key = encode_entry(entry), f"{self.prefix}/{entry_name(entry.seq)}"
        readable = decode_entry(data, self.kinds, where=f"{key}, not written")
        if self._put(key, data, entry.write_id):
            return ReadEntry(entry=readable, sha256=sha256(data))
        return None

    def _put(self, key: str, data: bytes, write_id: str) -> bool:
        problem: StoreUnavailable | None = None
        for number in range(_TRIES):
            if number:
                self.sleep(min(0.1 * 2**number, 5.0))
            try:
                if self.store.create(key, data):
                    return True
            except StoreUnavailable as error:
                problem = error
            try:
                return decode_entry(self.store.read(key), {}, where=key).write_id == write_id
            except ObjectMissing:
                continue
            except StoreUnavailable as error:
                problem = error
        raise AppendUnknown(
            f"{key}: not settled after {_TRIES} tries, nothing is acknowledged; run the same command again: {problem}"
        ) from problem
