"""Every parser of stored bytes, fuzzed: an `IntegrityError` that says where, or a value that survives its own codec.

Never another exception, whatever the bytes: arbitrary ones, arbitrary JSON, and real documents changed a little. The
default suite tries fifty of each, `make test-slow` five thousand.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.storage.checkpoints.payload import ManifestShard, TensorDigest, TrainerDocument, decode_manifest
from cairn.storage.errors import IntegrityError
from cairn.storage.logs.fold_cache import decode_history, encode_history
from cairn.storage.logs.log_entry import decode_entry
from cairn.storage.logs.registry import MODEL_KINDS
from cairn.storage.logs.run_entries import RUN_KINDS
from cairn.storage.logs.run_log import fold
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import Heartbeat
from cairn.storage.snapshots.snapshot_manifest import (
    RejectedCount,
    SnapshotGroup,
    SnapshotManifest,
    SnapshotObject,
)
from cairn.storage.stores.codec import decode, encode
from tests.cairn.hostile_store import change, places
from tests.storage.builders import bodies, entry, manifest_of, promoted, trainer_document
from tests.storage.staged_snapshot import manifest_of as snapshot_of


@dataclass(frozen=True, kw_only=True)
class Parser:
    """A codec and real documents of it."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    real: tuple[Any, ...]


def of_record(record_type: type, *real: Any) -> Parser:
    return Parser(decode=lambda data: decode(data, record_type, where="here"), encode=encode, real=real)


MANIFEST = manifest_of(
    shards=(
        ManifestShard(
            name="weights-00001-of-00001.safetensors",
            bytes=20,
            sha256="b" * 64,
            header_bytes=8,
            tensors=(
                TensorDigest(name="model.w", dtype="F32", shape=(3, 1), chunks=bytes(32)),
                TensorDigest(name="model.none", dtype="F32", shape=(0,), chunks=b""),
            ),
        ),
    ),
)
SNAPSHOT = replace(
    snapshot_of(train=9, val=1),
    objects=(SnapshotObject(key="train-00000.arrow", bytes=18, sha256="b", tokens=9),),
    rejected=(RejectedCount(kind="not-utf8", documents=1),),
    groups=(SnapshotGroup(name="a.txt", sources=1, train_tokens=9, val_tokens=1),),
)
ENTRIES = tuple(entry(body, attempt=1, seq=n) for n, body in enumerate(bodies()))
PARSERS = {
    "log entry": Parser(decode=partial(decode_entry, kinds=RUN_KINDS, where="here"), encode=encode, real=ENTRIES),
    "registry entry": Parser(
        decode=partial(decode_entry, kinds=MODEL_KINDS, where="here"),
        encode=encode,
        real=(replace(ENTRIES[0], kind="promoted", body=promoted(5)),),
    ),
    "manifest": Parser(decode=partial(decode_manifest, where="here"), encode=encode, real=(MANIFEST,)),
    "trainer document": of_record(TrainerDocument, trainer_document(5)),
    "snapshot manifest": of_record(SnapshotManifest, SNAPSHOT),
    "heartbeat": of_record(Heartbeat, Heartbeat(attempt=1, beat=2, step=3, train_loss=1.5, tokens=4, gpu_seconds=0.5)),
    "folded state": Parser(
        decode=partial(decode, record_type=RunState, where="here", hook=decode_history),
        encode=partial(encode, hook=encode_history),
        real=(fold(ENTRIES),),
    ),
}
every_parser = pytest.mark.parametrize("name", PARSERS)
NUMBERS = (
    st.integers()
    | st.sampled_from([0, -1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400])
    | st.floats(allow_nan=False, allow_infinity=False)
)
WORDS = st.text(max_size=8) | st.sampled_from(
    [
        "",
        "..",
        "/etc/passwd",
        "a/../b",
        "\x1b[2J",
        "\0",
        "9999-12-31T23:59:59-14:00",
        "0001-01-01T00:00:00+14:00",
        "1e999",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


def survives(parser: Parser, data: bytes) -> None:
    """Hold the promise for these bytes."""
    try:
        value = parser.decode(data)
    except IntegrityError as error:
        assert str(error).startswith("here")
        return
    assert parser.decode(parser.encode(value)) == value


def changed_value(parser: Parser, data: st.DataObject) -> bytes:
    document = json.loads(parser.encode(data.draw(st.sampled_from(parser.real))))
    place = data.draw(st.sampled_from([(), *places(document)]))
    if not place:
        return json.dumps(data.draw(JSON)).encode()
    change(document, place, data.draw(JSON | st.just(...)))
    return json.dumps(document).encode()


def changed_bytes(parser: Parser, data: st.DataObject) -> bytes:
    real = bytearray(parser.encode(data.draw(st.sampled_from(parser.real))))
    for _ in range(data.draw(st.integers(1, 3))):
        real[data.draw(st.integers(0, len(real) - 1))] = data.draw(st.integers(0, 255))
    return bytes(real[: data.draw(st.integers(0, len(real)) | st.just(len(real)))])


TRIES: dict[str, Callable[[Parser, st.DataObject], bytes]] = {
    "bytes": lambda parser, data: data.draw(st.binary(max_size=200)),
    "json": lambda parser, data: json.dumps(data.draw(JSON)).encode(),
    "a changed value": changed_value,
    "changed bytes": changed_bytes,
}


def fuzz(name: str, how: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.data())
    def tried(data: st.DataObject) -> None:
        survives(PARSERS[name], TRIES[how](PARSERS[name], data))

    tried()


@every_parser
@pytest.mark.parametrize("how", TRIES)
def test_a_parser_refuses_by_name_or_reads_what_it_could_write(name: str, how: str) -> None:
    fuzz(name, how, 50)


@pytest.mark.slow
@every_parser
@pytest.mark.parametrize("how", TRIES)
def test_five_thousand_times_it_refuses_by_name_or_reads_what_it_could_write(name: str, how: str) -> None:
    fuzz(name, how, 5_000)


BREAKING = {
    "lists": b"[" * 1_000_000,
    "objects": b'{"a":' * 1_000_000,
    "closed": b'{"x":' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    "nan": b'{"a":NaN}',
    "infinity": b'{"a":Infinity}',
    "too large": b'{"a":1e999}',
    "a million digits": b'{"a":' + b"9" * 1_000_000 + b"}",
    "a surrogate": b'"\\ud800"',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "no UTF-8": b"\xff",
    "two documents": b"{} {}",
}


@every_parser
@pytest.mark.parametrize("data", BREAKING.values(), ids=BREAKING)
@pytest.mark.timeout(60)
def test_what_breaks_parsers_is_refused_by_name(name: str, data: bytes) -> None:
    try:
        value = PARSERS[name].decode(data)
    except IntegrityError as error:
        assert str(error).startswith("here")
    else:  # a document that needs no field ignores one it does not know
        assert value == RunState()


@every_parser
def test_of_a_field_named_twice_the_last_one_counts_for_every_reader_alike(name: str) -> None:
    real = PARSERS[name].encode(PARSERS[name].real[0])
    doubled = b'{"step": "no number", "version": "none", "seq": [], ' + real.lstrip()[1:]
    try:
        assert PARSERS[name].decode(doubled) == PARSERS[name].real[0]
    except IntegrityError:
        return
