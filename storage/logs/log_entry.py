"""An append-only log of entries in an object store: their JSON and names, sequence numbers, prev chain and appends.

An append is committed, lost to a faster writer, or unknown (as in PyIceberg). The kinds of entries are a parameter; a
body of an unknown kind or newer version stays plain JSON.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from cairn.storage import errors
from cairn.storage.stores import codec, object_store

FORMAT_VERSION = 1
"""The newest version of an entry that this program understands."""
WRITER_VERSION = 1
"""The version of the rules that this program follows when it appends, supersedes and deletes."""
LAST_SEQ = 9_999_999_999
_CHECKSUM = b'\n "checksum": '
_CHANGED = "it was changed, or is read wrongly here: read it on another host, or put it back as it was written"


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """The process that writes; `attempt` is the fencing epoch and None for entries that belong to no attempt."""

    host: str
    pid: int
    attempt: int | None = None
    flow_run_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePeak:
    """The FLOP/s of one device that MFU is a share of, and where it comes from: `data sheet` or `measured`."""

    flops: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """The facts that decide, besides configuration and data, which bits an attempt computes; equal digests, equal bits.

    `name` is `training.arithmetic`, `processor` begins with the accelerator, `flags` are settings of the libraries.
    """

    digest: str
    name: str
    processor: str
    instructions: str
    libraries: str
    flags: str

    def __str__(self) -> str:
        """Return its facts."""
        return "; ".join((self.processor, self.instructions, self.libraries, self.flags))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReference:
    """One committed checkpoint: all that a resume needs."""

    step: int
    attempt: int
    prefix: str
    manifest_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkOrigin:
    """The checkpoint of another run that a run begins with: weights, optimizer, generators and step.

    `quarantined_windows` are those of the same data that the other run did not draw from there on, `config` is the
    whole configuration that the first attempt gets if it is given none. `draws` and `tokens` are what was trained on up
    to the checkpoint, `component_draws` the draws of each source of this run's own data among them: order, epoch and
    counters go on from there (from step times batch where older logs have none). `arithmetic` computed the checkpoint.
    """

    run_id: str
    checkpoint: CheckpointReference
    state_sha256: str
    quarantined_windows: tuple[int, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    draws: int | None = None
    tokens: int | None = None
    component_draws: tuple[int, ...] = ()
    arithmetic: Arithmetic | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One fact, created only if absent at its sequence number; `body` is a record of its kind.

    `prev` is the SHA-256 of the entry before it. `checksum`, in every version, is the SHA-256 of the object's own bytes
    without the line that holds it; an early entry has none, and no field that is not in this table.
    """

    version: int
    seq: int
    kind: str
    at: datetime
    write_id: str
    prev: str | None
    writer: Writer
    resume: tuple[CheckpointReference, ...]
    body: Any
    checksum: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewerEntry:
    """The first entry of a log that this program does not understand: a newer one has written there."""

    seq: int
    kind: str
    version: int


def check_place(log: str, name: str, told: str) -> None:
    """Raise `IntegrityError` where a log's entries are those of another run than its place is named after."""
    if told != name:
        problem = f"its entries are those of {told[:80]!a}, and it lies where {name} should"
        raise errors.IntegrityError(f"{log}: {problem}: move the folder back, or delete it")


def describe_newer(newer: NewerEntry | None) -> str:
    """Return in words why a log with this entry is closed to this program's writers; empty for None."""
    if newer is None:
        return ""
    return f"seq {newer.seq} is a {newer.kind} of version {newer.version}, which a newer Cairn has written"


def refuse_old_writer(why: str, what: str) -> None:
    """Raise `WriterTooOld` if there is a reason why this program may not write."""
    if why:
        rule = "it can be read here, but only a newer Cairn may go on with it: update it"
        raise errors.WriterTooOld(f"{what}: {why}; {rule}")


def entry_name(seq: int) -> str:
    """Return the object name of a sequence number: inverted, so that the newest entry is listed first."""
    return f"{LAST_SEQ - seq:010d}.json"


def seq_of(name: str) -> int:
    """Return the sequence number of an object name; raise `IntegrityError` on any other name."""
    digits = name.removesuffix(".json")
    if not (name.endswith(".json") and len(digits) == 10 and digits.isascii() and digits.isdigit()):
        raise errors.IntegrityError(f"log object {name!r}: must be ten digits and .json; another program writes here")
    return LAST_SEQ - int(digits)


def encode_entry(entry: Entry | Mapping[str, Any]) -> bytes:
    """Return the bytes of an entry whose checksum is None, with the checksum that they have."""
    data = codec.encode(entry)
    return data.replace(_CHECKSUM + b"null", _CHECKSUM + b'"%s"' % _checksum_of(data).encode(), 1)


def _checksum_of(data: bytes) -> str:
    # The only such line: strings hold no line end, deeper keys more blanks.
    before, _, after = data.partition(_CHECKSUM)
    return codec.sha256(before + after[after.find(b"\n") :])


def decode_entry(data: bytes, kinds: Mapping[str, type], *, where: str) -> Entry:
    """Return the entry in `data`; raise `IntegrityError` naming `where` on anything malformed or changed."""
    entry = codec.decode(data, Entry, where=where)
    if entry.checksum is None:  # a bit that flips in the field's own name must not make it an early entry
        if unknown := sorted(codec.decode(data, dict, where=where).keys() - Entry.__dataclass_fields__.keys()):
            raise errors.IntegrityError(f"{where}: has no checksum, and {', '.join(unknown)}; {_CHANGED}")
    elif entry.checksum != (found := _checksum_of(data)):
        raise errors.IntegrityError(f"{where}: its checksum is {entry.checksum}, its bytes have {found}; {_CHANGED}")
    known = kinds.get(entry.kind, dict) if entry.version <= FORMAT_VERSION else dict
    return replace(entry, body=codec.convert(entry.body, known, where=f"{where} body"))


_TRIES = 6
_PROBES = 16


def utc_now() -> datetime:
    """Return this host's wall clock in UTC. Entries carry it for people; nothing is decided by it."""
    return datetime.now(UTC)


def this_writer(*, attempt: int | None = None, flow_run_id: str | None = None) -> Writer:
    """Return this process as the writer of an entry."""
    return Writer(host=socket.gethostname(), pid=os.getpid(), attempt=attempt, flow_run_id=flow_run_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadEntry:
    """An entry and the SHA-256 of its bytes, which the next entry carries as `prev`."""

    entry: Entry
    sha256: str


def _read_plain_file(path: str) -> bytes:
    """Return an entry's bytes in a fifth of a store's time, none where the store must say; or `FileNotFoundError`."""
    try:
        descriptor = os.open(path, os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            size = os.fstat(descriptor).st_size  # 0 of a pipe or device
            data = os.read(descriptor, size + 1) if 0 < size <= codec.MAX_DOCUMENT_BYTES else b""
            return data if len(data) == size else b""
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError:
        return b""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryLog:
    """The log under `prefix`; `kinds` gives the record of each kind's body."""

    store: object_store.ObjectStore
    prefix: str
    kinds: Mapping[str, type]
    clock: Callable[[], datetime] = utc_now
    sleep: Callable[[float], None] = time.sleep

    def read(self, seq: int, folder: Path | None = None) -> ReadEntry | None:
        """Return entry `seq`, quickly from a local `folder`, or None after the last; `IntegrityError` if malformed."""
        key = f"{self.prefix}/{(name := entry_name(seq))}"
        try:
            data = (folder and _read_plain_file(f"{folder}/{name}")) or self.store.read(key)
        except (errors.ObjectMissing, FileNotFoundError):
            return None
        entry = decode_entry(data, self.kinds, where=key)
        if entry.seq != seq:
            raise errors.IntegrityError(f"{key}: holds seq {entry.seq}, must hold {seq}")
        return ReadEntry(entry=entry, sha256=codec.sha256(data))

    def newest_seq(self) -> int:
        """Return the newest entry's number in one request, -1 without entries."""
        key = self.store.first(self.prefix)
        return seq_of(key.rsplit("/", 1)[1]) if key else -1

    def check_reaches(self, seq: int, newest: int) -> None:
        """Raise `IntegrityError` naming the entry after `seq` if it is missing before `newest`, which is there."""
        if seq < newest:
            problem = f"seq {seq + 1} is missing, and seq {newest} is there: a copy or restore may be under way"
            advice = "nothing was written; wait for it, or put the entry back as it was, and try again"
            raise errors.IntegrityError(f"{self.prefix}/{entry_name(seq + 1)}: {problem}; {advice}")

    def read_after(self, last: ReadEntry | None) -> Iterator[ReadEntry]:
        """Yield every entry after `last`, oldest first; raise `IntegrityError` at the first that is not sound.

        Probes forward to the first absent number; after a few it asks for the newest name and reads with threads.
        """
        is_refresh = last is not None  # most of them find nothing, and only what is found is worth the question
        folder = None if is_refresh else self.store.local_path(self.prefix)
        for number in count():
            seq, newest = 0 if last is None else last.entry.seq + 1, -1
            if number == _PROBES and folder is None:  # not on a local disk, where reading ahead gains nothing
                newest = self.newest_seq()
            ahead = object_store.ask_each(self.store, self.read, range(seq, newest + 1))
            for read in ahead if newest > seq else (self.read(seq, folder),):
                if read is None:
                    return
                if read.entry.prev != (expected := last.sha256 if last else None):
                    problem = f"prev is {read.entry.prev}, must be {expected}: an entry before it was changed"
                    raise errors.IntegrityError(f"{self.prefix}/{entry_name(read.entry.seq)}: {problem}")
                yield read
                last = read
            folder = self.store.local_path(self.prefix) if is_refresh and not number else folder

    def append(
        self, body: Any, *, after: ReadEntry | None, writer: Writer, resume: tuple[CheckpointReference, ...] = ()
    ) -> ReadEntry | None:
        """Append `body` right after `after`; return the new entry, or None if another writer took its number.

        Raises `StoreRefused` when nothing was written, `AppendUnknown` when the outcome could not be established, and
        `IntegrityError` before anything is written for a body that cannot be read back (JSON has no NaN).
        """
        entry = Entry(
            version=FORMAT_VERSION,
            seq=0 if after is None else after.entry.seq + 1,
            kind=next(kind for kind, record in self.kinds.items() if record is type(body)),
            at=self.clock(),
            write_id=uuid.uuid4().hex,
            prev=None if after is None else after.sha256,
            writer=writer,
            resume=resume,
            body=body,
        )
        data, key = encode_entry(entry), f"{self.prefix}/{entry_name(entry.seq)}"
        written = decode_entry(data, self.kinds, where=f"{key}, not written")
        appended = ReadEntry(entry=written, sha256=codec.sha256(data))
        problem: errors.StoreUnavailable | None = None
        may_be_written = False
        for number in range(_TRIES):
            if number:
                self.sleep(min(0.1 * 2**number, 5.0))
            try:
                if self.store.create(key, data):
                    return appended
                may_be_written = True  # a 412 may answer a PUT that was sent twice
            except errors.StoreUnavailable as error:
                problem = error
                may_be_written |= not isinstance(error, errors.StoreRefused)
            try:
                found = decode_entry(self.store.read(key), {}, where=key)
                return appended if found.write_id == entry.write_id else None
            except errors.ObjectMissing:
                pass
            except errors.StoreUnavailable as error:
                problem = problem if isinstance(problem, errors.StoreRefused) else error
            if isinstance(problem, errors.StoreRefused):
                if not may_be_written:
                    raise problem
                break
        advice = f"nothing is acknowledged; run the same command again: {problem}"
        raise errors.AppendUnknown(f"{key}: not settled in {number + 1} tries, {advice}") from problem
