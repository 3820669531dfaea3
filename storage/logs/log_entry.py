"""One entry of a log: its envelope, its JSON and its object name.

Does not know any kind of entry: the kinds are a parameter. A kind that is not among them is kept as `UnknownBody`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import msgspec

from storage.errors import IntegrityError
from storage.stores.document import decode, encode

FORMAT_VERSION = 1
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
class UnknownBody:
    """The body of an entry whose kind or format version is newer than this reader: kept, not interpreted."""

    kind: str
    content: Mapping[str, Any]
    version: int = 1


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


_SHARED_FIELDS = tuple(field.name for field in fields(Entry) if field.name != "body")


def entry_name(seq: int) -> str:
    """Return the object name of a sequence number: inverted, so that the newest entry is listed first."""
    return f"{LAST_SEQ - seq:010d}.json"


def seq_of(name: str) -> int:
    """Return the sequence number of an object name; raise `IntegrityError` on any other name."""
    digits = name.removesuffix(".json")
    if not (name.endswith(".json") and len(digits) == 10 and digits.isascii() and digits.isdigit()):
        raise IntegrityError(f"log object {name!r}: must be ten digits and .json; another program writes here")
    return LAST_SEQ - int(digits)


def encode_entry(entry: Entry) -> bytes:
    """Return the entry as sorted, readable JSON."""
    body = msgspec.Raw(msgspec.json.encode(entry.body, order="sorted"))
    return encode(_Envelope(version=FORMAT_VERSION, body=body, **_shared(entry)))


def decode_entry(data: bytes, kinds: Mapping[str, type], *, where: str) -> Entry:
    """Return the entry in `data`; raise `IntegrityError` naming `where` on anything malformed."""
    envelope = decode(data, _Envelope, where=where)
    known = kinds.get(envelope.kind) if envelope.version <= FORMAT_VERSION else None
    body: object
    if known is None:
        content = decode(bytes(envelope.body), dict, where=where)
        body = UnknownBody(kind=envelope.kind, content=content, version=envelope.version)
    else:
        body = decode(bytes(envelope.body), known, where=f"{where} body")
    return Entry(body=body, **_shared(envelope))


def _shared(record: Entry | _Envelope) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _SHARED_FIELDS}
