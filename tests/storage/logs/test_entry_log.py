"""The three outcomes of an append, and what a reader makes of a log."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from cairn.storage.errors import (
    AppendUnknown,
    Fenced,
    IntegrityError,
    NotDurable,
    StoreRefused,
    StoreUnavailable,
    WriterTooOld,
)
from cairn.storage.logs.log_entry import FORMAT_VERSION, EntryLog, encode_entry, entry_name
from cairn.storage.logs.registry import MODEL_KINDS, Registry, RolledBack
from cairn.storage.logs.run_entries import CheckpointCommitted
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.codec import encode
from cairn.storage.stores.object_store import ObjectStore, RetryPolicy
from tests.entries import ended, evaluated, writer
from tests.memory_store import MemoryStore
from tests.storage.builders import (
    LOG,
    append_as_a_newer_program,
    check_invariants,
    claim,
    commit,
    committed,
    entry,
    entry_log,
    newest_entry,
    no_sleep,
    open_run,
    opened,
    run_log,
    run_with_commits,
    stage,
)
from tests.storage.faulty_store import FaultyStore


class ScriptedStore:
    """Answers the n-th `create` as the n-th line of the script says, then honestly."""

    def __init__(self, inner: ObjectStore, *script: str) -> None:
        self.inner, self.script, self.creates = inner, list(script), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, key: str) -> bytes:
        if self.script and self.script[0] == "read fails":
            self.script.pop(0)
            raise StoreUnavailable("scripted")
        return self.inner.read(key)

    def create(self, key: str, data: bytes) -> bool:
        self.creates += 1
        match self.script.pop(0) if self.script else "honest":
            case "412 from its own first try":
                self.inner.create(key, data)
                return False
            case "response lost":
                self.inner.create(key, data)
            case "somebody else, response lost":
                self.inner.create(key, encode(entry(opened())))
            case "somebody else":
                return not self.inner.create(key, encode(entry(opened())))
            case "refused":
                raise StoreRefused("AccessDenied")
            case "not durable":
                self.inner.create(key, data)
                raise NotDurable("fsync: EIO")
            case "honest":
                return self.inner.create(key, data)
        raise StoreUnavailable("scripted")


def append_first(store: Any) -> bool:
    return entry_log(store).append(opened(), after=None, writer=writer()) is not None


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(("412 from its own first try",), id="412-from-its-own-first-try"),
        pytest.param(("response lost",), id="lost-response"),
        pytest.param(("nothing happened", "nothing happened", "honest"), id="two-errors-then-success"),
        pytest.param(("response lost", "read fails", "response lost"), id="lost-response-and-lost-read-back"),
    ],
)
def test_an_append_that_landed_is_committed_exactly_once(store: ObjectStore, script: tuple[str, ...]) -> None:
    assert append_first(ScriptedStore(store, *script))
    assert store.keys(LOG) == [f"{LOG}/{entry_name(0)}"]
    check_invariants(store, set())


@pytest.mark.parametrize("answer", ["somebody else", "somebody else, response lost"])
def test_an_append_that_finds_a_foreign_entry_has_lost_the_race(store: ObjectStore, answer: str) -> None:
    assert not append_first(ScriptedStore(store, answer))


def test_a_lost_race_is_decided_again_on_the_newer_state(store: ObjectStore) -> None:
    seen: list[RunState] = []

    def decide(state: RunState) -> object:
        seen.append(state)
        return opened() if state.opened is None else None

    run_log(ScriptedStore(store, "somebody else")).append(decide, writer=writer())  # type: ignore[arg-type]
    assert [state.opened is None for state in seen] == [True, False]


def test_an_append_that_cannot_be_settled_is_unknown_and_acknowledges_nothing(store: ObjectStore) -> None:
    log = run_log(ScriptedStore(store, *["nothing happened"] * 6))  # type: ignore[arg-type]
    with pytest.raises(AppendUnknown, match="nothing is acknowledged"):
        log.append(lambda state: opened(), writer=writer())
    assert (log.seq, log.state.opened) == (-1, None)


def test_an_unsettled_append_puts_the_same_bytes_again_and_a_bounded_number_of_times(store: ObjectStore) -> None:
    scripted = ScriptedStore(store, *["nothing happened"] * 99)
    with pytest.raises(AppendUnknown):
        append_first(scripted)
    assert scripted.creates == 6


def test_an_append_that_the_store_refuses_is_tried_once_however_long_the_run_waits(store: ObjectStore) -> None:
    scripted = ScriptedStore(store, *["refused"] * 999)
    with pytest.raises(StoreRefused, match="AccessDenied"):
        RetryPolicy(tries=999, total_seconds=600.0, sleep=no_sleep).call(lambda: append_first(scripted))
    assert scripted.creates == 1


def test_an_append_that_is_refused_although_reading_back_fails_is_refused(store: ObjectStore) -> None:
    with pytest.raises(StoreRefused):
        append_first(ScriptedStore(store, "refused", "read fails"))


def test_a_refusal_after_a_put_that_may_still_land_is_unknown_and_ends_the_tries(store: ObjectStore) -> None:
    scripted = ScriptedStore(store, "nothing happened", *["refused"] * 9)
    with pytest.raises(AppendUnknown, match="not settled in 2 tries"):
        append_first(scripted)


def test_a_refusal_after_a_put_that_did_land_is_settled_by_reading_back(store: ObjectStore) -> None:
    assert append_first(ScriptedStore(store, "response lost", "read fails", "refused"))


def test_an_entry_that_is_visible_and_may_not_be_durable_is_not_acknowledged(store: ObjectStore) -> None:
    scripted = ScriptedStore(store, "not durable")
    with pytest.raises(NotDurable):
        RetryPolicy(tries=9, sleep=no_sleep).call(lambda: append_first(scripted))
    assert scripted.creates == 1


def test_a_commit_that_may_not_be_durable_is_found_by_the_next_process_and_not_repeated(store: ObjectStore) -> None:
    claim(open_run(store))
    staged = stage(store, step=5, attempt=1)
    with pytest.raises(NotDurable):
        commit(run_log(ScriptedStore(store, "not durable")), staged)  # type: ignore[arg-type]
    entries = len(store.keys(LOG))
    commit(run_log(store), staged)
    assert len(store.keys(LOG)) == entries


def test_an_append_waits_longer_from_try_to_try() -> None:
    waited: list[float] = []
    scripted: Any = ScriptedStore(MemoryStore(), *["nothing happened"] * 6)
    with pytest.raises(AppendUnknown):
        EntryLog(store=scripted, prefix=LOG, kinds={"run-opened": type(opened())}, sleep=waited.append).append(
            opened(), after=None, writer=writer()
        )
    assert waited == sorted(waited)
    assert 1 < sum(waited) < 30


def test_an_unknown_append_that_had_landed_after_all_is_seen_by_the_next_read(store: ObjectStore) -> None:
    scripted = ScriptedStore(store, "response lost", *["read fails", "nothing happened"] * 5, "read fails")
    log = run_log(scripted)  # type: ignore[arg-type]
    with pytest.raises(AppendUnknown):
        log.append(lambda state: opened(), writer=writer())
    assert log.refresh().opened == opened()


def test_a_body_that_could_not_be_read_back_is_refused_before_it_is_written(store: ObjectStore) -> None:
    log = open_run(store)
    with pytest.raises(IntegrityError, match="not written"):
        log.append(lambda state: evaluated(5, float("nan")), writer=writer())
    assert len(store.keys(LOG)) == 1


def test_the_writer_of_an_entry_and_its_readers_hold_the_same_state(store: ObjectStore) -> None:
    assert run_with_commits(store, 5, 10).state == run_log(store).refresh()


@pytest.mark.parametrize("length", [1, 2, 1000])
def test_the_newest_entry_takes_two_requests_however_long_the_log(length: int) -> None:
    memory = MemoryStore()
    for seq in range(length):
        memory.create(f"{LOG}/{entry_name(seq)}", encode(entry(opened(), seq=seq)))
    counting = FaultyStore(memory)
    newest = newest_entry(entry_log(counting))  # type: ignore[arg-type]
    assert newest is not None
    assert (newest.entry.seq, counting.operations) == (length - 1, ["first", "read"])


def test_an_empty_log_has_no_newest_entry(store: ObjectStore) -> None:
    assert newest_entry(entry_log(store)) is None


def test_the_newest_entry_alone_says_what_to_resume_from(store: ObjectStore) -> None:
    state = run_with_commits(store, *range(1, 11)).state
    newest = newest_entry(entry_log(store))
    assert newest is not None
    assert [reference.step for reference in newest.entry.resume] == [10, 9, 8, 7, 6, 5, 4, 3]
    assert newest.entry.resume == state.resume


@pytest.mark.unsound_log
@pytest.mark.parametrize("name", ["0000.json", "0-lost+found", "00000000012.json", "000000001a.json"])
def test_a_foreign_file_in_the_log_folder_is_named(store: ObjectStore, name: str) -> None:
    open_run(store)
    store.write(f"{LOG}/{name}", b"{}")
    with pytest.raises(IntegrityError, match=name.replace("+", r"\+")):
        newest_entry(entry_log(store))


@pytest.mark.unsound_log
def test_an_entry_changed_in_place_is_noticed_through_the_prev_chain(store: ObjectStore) -> None:
    run_with_commits(store, 5)
    key = f"{LOG}/{entry_name(1)}"
    document = msgspec.json.decode(store.read(key).replace(b'"lr"', b'"lR"').replace(b'"cpu"', b'"gpu"'))
    store.write(key, encode_entry({**document, "checksum": None}))
    with pytest.raises(IntegrityError, match="an entry before it was changed"):
        run_log(store).refresh()


@pytest.mark.unsound_log
def test_an_entry_under_another_number_is_refused(store: ObjectStore) -> None:
    open_run(store)
    store.create(f"{LOG}/{entry_name(1)}", store.read(f"{LOG}/{entry_name(0)}"))
    with pytest.raises(IntegrityError, match="holds seq 0, must hold 1"):
        run_log(store).refresh()


def test_reading_again_reads_only_what_is_new(store: ObjectStore) -> None:
    counting = FaultyStore(store)
    run_with_commits(store, 5)
    reader = run_log(counting)  # type: ignore[arg-type]
    reader.refresh()
    counting.operations.clear()
    reader.refresh()
    assert counting.operations == ["read"]


NEWER: tuple[dict[str, object], ...] = (
    {"kind": "checkpoint-blessed"},
    {"kind": "attempt-started", "version": FORMAT_VERSION + 1},
)


@pytest.mark.parametrize("changed", NEWER, ids=["kind", "version"])
def test_an_entry_of_a_newer_program_does_not_stop_an_older_reader(
    store: ObjectStore, changed: dict[str, object]
) -> None:
    log = run_with_commits(store, 5)
    append_as_a_newer_program(store, **changed)
    newest = log.refresh().newest_committed
    assert newest is not None
    assert newest.committed.step == 5


@pytest.mark.parametrize("changed", NEWER, ids=["kind", "version"])
def test_an_entry_of_a_newer_program_stops_an_older_writer(store: ObjectStore, changed: dict[str, object]) -> None:
    log = run_with_commits(store, 5)
    staged = stage(store, step=10, attempt=1)
    append_as_a_newer_program(store, **changed)
    before = len(store.keys(LOG))
    with pytest.raises(WriterTooOld, match="only a newer Cairn may go on with it"):
        commit(log, staged)
    assert len(store.keys(LOG)) == before


def test_a_run_that_asks_for_a_newer_writer_is_read_and_not_written(store: ObjectStore) -> None:
    log = run_log(store)
    body = replace(opened(), smallest_writer_version=2)
    log.append(lambda state: body, writer=writer())
    assert log.refresh().opened == body
    with pytest.raises(WriterTooOld, match="asks for writer version 2, this program has 1"):
        claim(log)


def test_a_registry_with_an_entry_of_a_newer_program_is_read_and_not_written(store: ObjectStore) -> None:
    log = entry_log(store, "models/champion/log", MODEL_KINDS)
    decision = RolledBack(alias="champion", manifest_sha256=None, by="me", why="")
    log.append(decision, after=None, writer=writer())
    append_as_a_newer_program(store, log=log.prefix, kinds=MODEL_KINDS, kind="blessed")
    registry = Registry(store, "champion")
    assert len(registry.refresh().history) == 1
    with pytest.raises(WriterTooOld, match="seq 1 is a blessed"):
        registry.append(lambda state: decision)


def append_nothing(state: RunState) -> CheckpointCommitted | None:
    return None


def test_deciding_on_nothing_appends_nothing(store: ObjectStore) -> None:
    log = open_run(store)
    log.append(append_nothing, writer=writer())
    assert len(store.keys(LOG)) == 1


@pytest.mark.parametrize("body", [committed(5, 1), ended(1)], ids=["commit", "end"])
def test_nothing_is_written_that_every_reader_would_refuse(store: ObjectStore, body: object) -> None:
    log = open_run(store)
    with pytest.raises(Fenced, match="every reader would refuse"):
        log.append(lambda state: body, writer=writer())
    assert len(store.keys(LOG)) == 1
