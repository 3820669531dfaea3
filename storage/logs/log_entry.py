"""One entry of a log: envelope, JSON and object name; a body of an unknown kind or newer version stays plain JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from storage.errors import IntegrityError, WriterTooOld
from storage.stores.document import convert, decode

FORMAT_VERSION = 1
"""The newest version of an entry that this program understands."""
WRITER_VERSION = 1
"""The version of the rules that this program follows when it appends, supersedes and deletes."""
LAST_SEQ = 9_999_999_999


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """The process that writes; `attempt` is the fencing epoch and None for entries that belong to no attempt."""

    host: str
    pid: int
    attempt: int | None = None
    flow_run_id: str | None = None


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
    whole configuration that the first attempt gets where nobody gives one.
    """

    run_id: str
    checkpoint: CheckpointReference
    state_sha256: str
    quarantined_windows: tuple[int, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One fact, created only if absent at its sequence number; `body` is a record of its kind."""

    version: int
    seq: int
    kind: str
    at: datetime
    write_id: str
    prev: str | None
    writer: Writer
    resume: tuple[CheckpointReference, ...]
    body: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class NewerEntry:
    """The first entry of a log that this program does not understand: a newer one has written there."""

    seq: int
    kind: str
    version: int


def newer_entry(entry: Entry) -> NewerEntry:
    """Return what is known of an entry that this program does not understand."""
    return NewerEntry(seq=entry.seq, kind=entry.kind, version=entry.version)


def told_newer(newer: NewerEntry) -> str:
    """Return in words why a log with this entry is closed to this program's writers."""
    return f"seq {newer.seq} is a {newer.kind} of version {newer.version}, which a newer Cairn has written"


def refuse_old_writer(why: str, what: str) -> None:
    """Raise `WriterTooOld` if there is a reason why this program may not write."""
    if why:
        raise WriterTooOld(f"{what}: {why}; it can be read here, but only a newer Cairn may go on with it: update it")


def entry_name(seq: int) -> str:
    """Return the object name of a sequence number: inverted, so that the newest entry is listed first."""
    return f"{LAST_SEQ - seq:010d}.json"


def seq_of(name: str) -> int:
    """Return the sequence number of an object name; raise `IntegrityError` on any other name."""
    digits = name.removesuffix(".json")
    if not (name.endswith(".json") and len(digits) == 10 and digits.isascii() and digits.isdigit()):
        raise IntegrityError(f"log object {name!r}: must be ten digits and .json; another program writes here")
    return LAST_SEQ - int(digits)


def decode_entry(data: bytes, kinds: Mapping[str, type], *, where: str) -> Entry:
    """Return the entry in `data`; raise `IntegrityError` naming `where` on anything malformed."""
    entry = decode(data, Entry, where=where)
    known = kinds.get(entry.kind, dict) if entry.version <= FORMAT_VERSION else dict
    return replace(entry, body=convert(entry.body, known, where=f"{where} body"))
