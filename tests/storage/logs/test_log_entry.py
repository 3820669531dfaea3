"""An entry survives its own codec; anything else is refused by name. Drawn bytes and values: test_parser_fuzz.py."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.errors import IntegrityError
from cairn.storage.logs.log_entry import LAST_SEQ, Entry, decode_entry, encode_entry, entry_name, seq_of
from cairn.storage.logs.run_entries import RUN_KINDS
from cairn.storage.stores.codec import MAX_DOCUMENT_BYTES, encode
from tests.entries import started
from tests.storage.builders import bodies, entry, opened

each_body = pytest.mark.parametrize("body", bodies(), ids=lambda body: type(body).__name__)


def decoded(data: bytes) -> Entry:
    return decode_entry(data, RUN_KINDS, where="here")


def document(**changed: object) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(encode(entry(started(1), attempt=1)))
    return {**fields, **changed}


@each_body
def test_an_entry_reads_back_as_it_was(body: object) -> None:
    written = entry(body, attempt=1, seq=7)
    assert decoded(encode(written)) == written


@each_body
def test_equal_entries_have_equal_bytes(body: object) -> None:
    assert encode(decoded(encode(entry(body)))) == encode(entry(body))


def test_an_entry_is_sorted_and_readable_with_cat() -> None:
    text = encode(entry(started(1))).decode()
    assert list(json.loads(text)) == sorted(json.loads(text))
    assert text.endswith("}\n")
    assert max(len(line) for line in text.splitlines()) < 120


def test_the_newest_name_sorts_first() -> None:
    names = [entry_name(seq) for seq in (0, 1, 9, 10, 99_999)]
    assert sorted(names, reverse=True) == names


@given(st.integers(0, LAST_SEQ))
def test_a_name_gives_its_number_back(seq: int) -> None:
    assert seq_of(entry_name(seq)) == seq


@pytest.mark.parametrize(
    "name", ["", ".json", "1.json", "9999999999", "9999999999.json.bak", "-999999999.json", "٩٩٩٩٩٩٩٩٩٩.json"]
)
def test_a_foreign_name_is_refused_and_named(name: str) -> None:
    with pytest.raises(IntegrityError, match="another program writes here"):
        seq_of(name)


def test_a_kind_from_the_future_is_kept_and_written_back_unchanged() -> None:
    data = json.dumps(document(kind="checkpoint-blessed", body={"by": "pope", "more": [1, None]})).encode()
    kept = decoded(data)
    assert (kept.kind, kept.body) == ("checkpoint-blessed", {"by": "pope", "more": [1, None]})
    assert decoded(encode(kept)) == kept


def test_a_version_from_the_future_is_kept_without_being_interpreted() -> None:
    kept = decoded(json.dumps(document(version=2, body={"attempt": "two"})).encode())
    assert (kept.kind, kept.body, kept.version) == ("attempt-started", {"attempt": "two"}, 2)


def test_a_version_from_the_future_is_written_back_as_what_it_was() -> None:
    kept = decoded(json.dumps(document(version=2)).encode())
    assert decoded(encode(kept)) == kept


def test_a_field_from_the_future_is_ignored() -> None:
    assert decoded(encode_entry(document(colour="red"))).body == started(1)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"null", id="null"),
        pytest.param(b" " * (MAX_DOCUMENT_BYTES + 1), id="huge"),
        pytest.param(encode(entry(opened()))[:-20], id="torn"),
        pytest.param(b'{"body":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="deep-body"),
        *(
            pytest.param(json.dumps(document(**changed)).encode(), id=name)
            for name, changed in {
                "seq-of-wrong-type": {"seq": "1"},
                "seq-fractional": {"seq": 1.5},
                "no-time": {"at": "noon"},
                "writer-of-wrong-type": {"writer": 1},
                "body-null": {"body": None},
                "body-list": {"body": []},
                "body-incomplete": {"body": {"attempt": 1}},
                "unknown-body-list": {"kind": "new", "body": [1]},
                "resume-of-wrong-type": {"resume": [{"step": "x"}]},
                "attempt-zero": {"body": {**document()["body"], "attempt": 0}},
            }.items()
        ),
    ],
)
def test_a_malformed_entry_is_refused_and_named(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="here"):
        decoded(data)


def test_times_are_written_in_utc() -> None:
    assert b'"2026-01-01T12:00:00Z"' in encode(entry(opened()))
    assert decoded(encode(entry(opened()))).at == datetime(2026, 1, 1, 12, tzinfo=UTC)
