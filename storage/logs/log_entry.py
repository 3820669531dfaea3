"""One entry of a log: envelope, body, and their JSON.

Owns format version and codec. Refuses to know what an entry means for a run (`run_state`) or how it is
appended (`entry_log`). A kind this reader does not know is kept as `UnknownBody`, not refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from storage.errors import IntegrityError
from storage.logs.run_entries import CheckpointReference, UnknownBody
from storage.stores.document import decode, encode

FORMAT_VERSION = 1
LAST_SEQ = 9_999_999_999


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """Who writes: host, process, and for an attempt's own entries its number, the fencing epoch."""

    host: str
    pid: int
    attempt: int | None = None
    flow_run_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One fact, created only if absent at its sequence number."""

    seq: int
    kind: str
    at: datetime
    write_id: str
    prev: str | None
    writer: Writer
    resume: tuple[CheckpointReference, ...]
    body: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class _Envelope:
    version: int
    seq: int
    kind: str
    at: datetime
    write_id: str
    prev: str | None
    writer: Writer
    resume: tuple[CheckpointReference, ...]
    body: msgspec.Raw


def entry_name(seq: int) -> str:
    """Return the object name of a sequence number: inverted, so that the newest is listed first."""
    return f"{LAST_SEQ - seq:010d}.json"


def seq_of(name: str) -> int:
    """Return the sequence number of an object name; raise `IntegrityError` on a foreign name."""
    digits = name.removesuffix(".json")
    if not (name.endswith(".json") and len(digits) == 10 and digits.isascii() and digits.isdigit()):
        raise IntegrityError(f"log object {name!r}: must be ten digits and .json; something else writes here")
    return LAST_SEQ - int(digits)


def encode_entry(entry: Entry) -> bytes:
    """Return the entry's bytes, sorted and readable."""
    unknown = entry.body if isinstance(entry.body, UnknownBody) else None
    body = unknown.content if unknown else entry.body
    envelope = _Envelope(
        version=unknown.version if unknown else FORMAT_VERSION,
        seq=entry.seq,
        kind=entry.kind,
        at=entry.at,
        write_id=entry.write_id,
        prev=entry.prev,
        writer=entry.writer,
        resume=entry.resume,
        body=msgspec.Raw(msgspec.json.encode(body, order="sorted")),
    )
    return encode(envelope)


def decode_entry(data: bytes, kinds: Mapping[str, type], *, where: str) -> Entry:
    """Return the entry in `data`; raise `IntegrityError` naming `where` on anything malformed."""
    envelope = decode(data, _Envelope, where=where)
    body_type = kinds.get(envelope.kind)
    body: object
    if body_type is None or envelope.version > FORMAT_VERSION:
        content = decode(bytes(envelope.body), dict, where=where)
        body = UnknownBody(kind=envelope.kind, content=content, version=envelope.version)
    else:
        body = decode(bytes(envelope.body), body_type, where=f"{where} body")
    return Entry(
        seq=envelope.seq,
        kind=envelope.kind,
        at=envelope.at,
        write_id=envelope.write_id,
        prev=envelope.prev,
        writer=envelope.writer,
        resume=envelope.resume,
        body=body,
    )
