"""An entry carries the checksum of its own bytes: a changed bit is found in the newest entry too, and named."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.errors import IntegrityError
from cairn.storage.logs.log_entry import FORMAT_VERSION, Entry, decode_entry, encode_entry, entry_name
from cairn.storage.logs.registry import MODEL_KINDS, Registry, RolledBack
from cairn.storage.logs.run_entries import RUN_KINDS
from cairn.storage.stores.codec import encode
from cairn.storage.stores.object_store import ObjectStore
from tests.entries import started, writer
from tests.full_amount import share_of
from tests.memory_store import MemoryStore
from tests.storage.builders import LOG, bodies, claim, entry, entry_log, open_run, opened, run_log, run_with_commits


def flipped(data: bytes, every: int) -> Iterator[tuple[int, bytes]]:
    """Yield the data with each of its bits changed, or with one in so many."""
    for bit in range(0, len(data) * 8, every):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(changed)


def believed(data: bytes) -> Entry | None:
    try:
        return decode_entry(data, RUN_KINDS, where="here")
    except IntegrityError as error:
        assert str(error).startswith("here")
        return None


@pytest.mark.parametrize("body", bodies(), ids=lambda body: type(body).__name__)
def test_no_flipped_bit_of_an_entry_is_believed(body: object) -> None:
    data = encode_entry(entry(body, attempt=1, seq=7))
    assert [bit for bit, changed in flipped(data, share_of(5)) if believed(changed) is not None] == []


@given(st.data())
def test_no_changed_bytes_of_an_entry_are_believed(data: st.DataObject) -> None:
    written = encode_entry(entry(started(1), attempt=1))
    start = data.draw(st.integers(0, len(written) - 1))
    there = written[start : start + data.draw(st.integers(1, 8))]
    changed = data.draw(st.binary(min_size=len(there), max_size=len(there)).filter(lambda other: other != there))
    assert believed(written[:start] + changed + written[start + len(there) :]) is None


def test_anybody_can_compute_the_checksum_without_its_own_line() -> None:
    lines = encode_entry(entry(started(1), attempt=1)).splitlines(keepends=True)
    (own,) = [line for line in lines if line.startswith(b' "checksum": ')]
    rest = b"".join(line for line in lines if line is not own)
    assert json.loads(b"{" + own.rstrip(b",\n") + b"}") == {"checksum": sha256(rest).hexdigest()}


def test_every_entry_that_is_appended_has_a_checksum(store: ObjectStore) -> None:
    run_with_commits(store, 5)
    Registry(store, "champion").append(lambda state: RolledBack(alias="a", manifest_sha256=None, by="me", why=""))
    for key in [*store.keys(LOG), *store.keys("models/champion/log")]:
        assert decode_entry(store.read(key), {**RUN_KINDS, **MODEL_KINDS}, where=key).checksum is not None


@pytest.mark.parametrize("version", [FORMAT_VERSION, FORMAT_VERSION + 1])
def test_the_checksum_holds_in_every_version(version: int) -> None:
    data = encode_entry(replace(entry(started(1)), version=version))
    assert believed(data) is not None
    assert believed(data.replace(b'"cpu"', b'"gpu"')) is None


def test_an_early_entry_without_a_checksum_is_read() -> None:
    early = json.loads(encode(entry(started(1))))
    del early["checksum"]
    assert believed(encode(early)) == entry(started(1))


def test_a_log_goes_on_behind_early_entries(store: ObjectStore) -> None:
    open_run(store)
    key = f"{LOG}/{entry_name(0)}"
    early = json.loads(store.read(key))
    del early["checksum"]
    store.write(key, encode(early))
    claim(run_log(store))
    assert run_log(store).refresh().latest_attempt == 1


@pytest.fixture(scope="module")
def run() -> MemoryStore:
    """A run whose newest entry is a commit."""
    store = MemoryStore("run")
    run_with_commits(store, 5, 10)
    return store


ACTS: dict[str, Callable[[ObjectStore], object]] = {
    "read": lambda store: run_log(store).refresh(),
    "claim": lambda store: claim(run_log(store)),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_flipped_bit_in_the_newest_entry_is_refused_by_name_and_nothing_is_written(
    run: MemoryStore, act: str
) -> None:
    newest = run.keys(LOG)[0]
    honest, there = run.read(newest), run.keys("runs")
    try:
        for _, changed in flipped(honest, 7 * share_of(3)):
            run.write(newest, changed)
            with pytest.raises(IntegrityError, match=newest):
                ACTS[act](run)
    finally:
        run.write(newest, honest)
    assert run.keys("runs") == there


@pytest.mark.unsound_log
def test_a_damaged_entry_before_the_newest_is_named_itself(store: ObjectStore) -> None:
    run_with_commits(store, 5)
    key = f"{LOG}/{entry_name(1)}"
    store.write(key, store.read(key).replace(b'"cpu"', b'"gpu"'))
    with pytest.raises(IntegrityError, match=rf"{entry_name(1)}: its checksum is .*put it back as it was written"):
        run_log(store).refresh()


def test_an_append_whose_read_back_is_damaged_is_not_taken_for_a_lost_race(store: ObjectStore) -> None:
    create, read = store.create, store.read

    def answer_lost(key: str, data: bytes) -> bool:
        create(key, data)
        return False

    def misread(key: str, **named: int) -> bytes:
        return read(key, **named).replace(b'"write_id": "', b'"write_id": "0')

    store.create, store.read = answer_lost, misread  # type: ignore[method-assign]
    with pytest.raises(IntegrityError, match="checksum"):
        entry_log(store).append(opened(), after=None, writer=writer())
