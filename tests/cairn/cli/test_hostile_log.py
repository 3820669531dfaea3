"""A store somebody else wrote to: whatever its logs say, a verb answers, or refuses in one line with the right code.

Never a traceback, never a hang, and no word of a log steers the terminal it is shown on. Entries are changed and then
chained anew, as only somebody who can write to the store could: hashes alone do not help against those.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.storage.logs.log_entry import entry_name
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.policy.failures import Evidence, ExceptionReport
from tests.cairn.hostile_store import AS_JSON, ESCAPES, FEW_VALUES, MORE_VALUES, VERBS, HostileStore, change, places
from tests.fabricated_run import fabricate

STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> HostileStore:
    return HostileStore(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> HostileStore:
    return HostileStore(tmp_path_factory.mktemp("interrupted"), is_finished=False)


@pytest.fixture
def steering(hostile: HostileStore) -> Iterator[HostileStore]:
    hostile.change_all_words(ESCAPES)
    yield hostile
    hostile.restore()


def is_answered(hostile: HostileStore, line: str) -> None:
    code, out, err = hostile.say(line)
    assert "Traceback" not in err, f"cairn {line}:\n{err}"
    assert code in (0, 2, 5), f"cairn {line}: exit {code}\n{err}"
    assert code == 0 or line.startswith("verify") or err.count("\n") <= 1, f"cairn {line}: {err}"
    assert not STEERING.search(out + err), f"cairn {line}: {STEERING.findall(out + err)}"


def fuzz(hostile: HostileStore, lines: list[str], examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.data())
    def tried(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(["runs/bard", "runs/bard", "runs/bard", "models/champion"]))
        entries = hostile.entries_of(name)
        entry = data.draw(st.sampled_from(entries))
        place = data.draw(st.sampled_from([place for place in places(entry) if place[0] not in ("prev", "seq")]))
        change(entry, place, data.draw(st.sampled_from([*FEW_VALUES, *MORE_VALUES, ...])))
        with hostile.written(entries, name):
            for line in lines:
                is_answered(hostile, line)

    tried()


@pytest.mark.xdist_group("hostile-log")
def test_a_log_with_any_value_anywhere_is_answered_or_refused_in_one_line(hostile: HostileStore) -> None:
    fuzz(hostile, VERBS, 8)


@pytest.mark.xdist_group("hostile-log")
def test_a_run_that_waited_since_before_there_were_dates_is_reported(hostile: HostileStore) -> None:
    entries = hostile.entries_of()
    entries[0]["at"] = "0001-01-01T00:00:00+14:00"
    with hostile.written(entries):
        is_answered(hostile, "report bard")


ANY_VALUE = [
    *(pytest.param(value, id=f"value {number}") for number, value in enumerate(FEW_VALUES)),
    *(
        pytest.param(value, id=f"further value {number}", marks=pytest.mark.slow)  # quick witness: those above
        for number, value in enumerate(MORE_VALUES)
    ),
]
EVIDENCE = [item.name for item in dataclasses.fields(Evidence)]
LAST_WORDS = [*(item.name for item in dataclasses.fields(ExceptionReport)), "spike_step"]


@pytest.mark.parametrize("value", ANY_VALUE)
@pytest.mark.parametrize("in_words", [False, True], ids=["evidence", "last words"])
def test_evidence_of_any_value_is_explained(hostile: HostileStore, value: object, in_words: bool) -> None:
    found = {"last_words": dict.fromkeys(LAST_WORDS, value)} if in_words else dict.fromkeys(EVIDENCE, value)
    entries = hostile.entries_of()
    for entry in entries:
        if entry["kind"] == "attempt-ended":
            entry["body"]["evidence"] = found
    with hostile.written(entries):
        for line in ("explain bard --attempt 1", "attempts bard"):
            is_answered(hostile, line)


@pytest.mark.parametrize("value", ANY_VALUE)
def test_a_cost_of_any_value_is_reported_or_refused(hostile: HostileStore, value: object) -> None:
    entries = hostile.entries_of()
    for entry in entries:
        if "config" in entry["body"]:
            entry["body"]["config"]["cost"] = value
    with hostile.written(entries):
        is_answered(hostile, "report bard")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("run", ["hostile", "interrupted"])
def test_a_thousand_such_logs_are_answered_or_refused_in_one_line(request: pytest.FixtureRequest, run: str) -> None:
    fuzz(request.getfixturevalue(run), [*VERBS, *AS_JSON], 500)


@pytest.mark.parametrize("line", [*VERBS, *AS_JSON])
def test_no_word_of_a_log_steers_the_terminal(steering: HostileStore, line: str) -> None:
    code, out, err = steering.say(line)
    assert (code, STEERING.findall(out + err)) == (0 if not line.startswith("verify") else code, [])


def test_json_keeps_every_character_that_it_writes_as_a_number(steering: HostileStore) -> None:
    entries = json.loads(steering.say("log bard --json")[1])
    ended = next(entry["body"] for entry in entries if entry["kind"] == "attempt-ended")
    assert ended["detail"].endswith(ESCAPES)


@pytest.mark.parametrize("section", ["exporters", "evaluation"])
def test_how_a_run_is_continued_is_said_whatever_its_configuration_says_of_it(
    interrupted: HostileStore, section: str
) -> None:
    entries = interrupted.entries_of()
    for entry in entries:
        if entry["kind"] == "attempt-started":
            entry["body"]["config"][section] = ["none of ours"]
    with interrupted.written(entries):
        is_answered(interrupted, "status bard")


def test_a_number_that_no_float_holds_is_none_of_a_configuration(hostile: HostileStore) -> None:
    entries = hostile.entries_of()
    for entry in entries:
        if "config" in entry["body"]:
            entry["body"]["config"]["training"]["grad_clip"] = 10**400
    with hostile.written(entries):
        is_answered(hostile, "diagnose bard")


def test_an_evaluation_without_a_held_out_loss_is_reported(hostile: HostileStore) -> None:
    entries = hostile.entries_of()
    next(entry for entry in entries if entry["kind"] == "evaluation-recorded")["body"]["metrics"] = {"other": 1.0}
    with hostile.written(entries):
        is_answered(hostile, "report bard")


@pytest.mark.parametrize(
    "where",
    [
        ("data",),
        ("data", "sources"),
        ("data", "tokenizer"),
        ("training", "lr"),
        ("training",),
        ("budgets",),
        ("budgets", "lost"),
        ("budgets", "lost", "retries"),
        ("promotion", "alias"),
        ("lease", "seconds"),
        ("a-key-of-tomorrow",),
    ],
    ids=".".join,
)
@pytest.mark.parametrize("line", ["status bard", "report bard", "explain bard", "sweep bard --dry-run"])
def test_a_configuration_that_is_none_is_an_integrity_error_in_one_line(
    hostile: HostileStore, line: str, where: tuple[str, ...]
) -> None:
    entries = hostile.entries_of()
    for entry in entries:
        if entry["kind"] in ("run-opened", "attempt-started") and (
            where[0] in entry["body"]["config"] or len(where) == 1
        ):
            change(entry["body"]["config"], where, ["\x1b[31m"])
    with hostile.written(entries):
        is_answered(hostile, line)


def damaged(data: bytes) -> Callable[[HostileStore], None]:
    def write(hostile: HostileStore) -> None:
        (hostile.logs["runs/bard"] / entry_name(0)).write_bytes(data)

    return write


def sparse(hostile: HostileStore) -> None:
    with (hostile.logs["runs/bard"] / entry_name(0)).open("wb") as file:
        file.truncate(2**40)


DAMAGES = {
    "empty": damaged(b""),
    "deep": damaged(b"[" * 1_000_000),
    "digits": damaged(b'{"a":' + b"9" * 100_000 + b"}"),
    "not-utf-8": damaged(b"\xff\xfe"),
    "a-terabyte": sparse,
}
READERS = ("status bard", "log bard", "attempts bard", "explain bard", "report bard")


@pytest.mark.parametrize(
    ("line", "damage"),
    [
        *((READERS[0], damage) for damage in DAMAGES),
        *((line, "empty") for line in READERS[1:]),
        *(
            pytest.param(line, damage, marks=pytest.mark.slow)  # quick witness: each line once, and each damage once
            for line in READERS[1:]
            for damage in list(DAMAGES)[1:]
        ),
    ],
)
@pytest.mark.timeout(60)
def test_an_entry_that_is_none_is_an_integrity_error_in_one_line(hostile: HostileStore, line: str, damage: str) -> None:
    with hostile.written(hostile.entries_of()):
        DAMAGES[damage](hostile)
        code, out, err = hostile.say(line)
    assert (code, out, err.count("\n")) == (5, "", 1) and "9999999999.json" in err


@pytest.mark.unsound_log
def test_one_hostile_run_does_not_hide_the_others(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    fabricate(store, "sound")
    fabricate(store, "torn")
    (tmp_path / "runs/torn/log" / entry_name(0)).write_bytes(b"[" * 1_000_000)
    (tmp_path / "runs" / "no key").mkdir()
    hostile = HostileStore.__new__(HostileStore)
    hostile.root = tmp_path
    code, out, _ = hostile.say("runs")
    assert code == 0 and "sound" in out and "unreadable" in out


def test_a_version_of_tomorrow_is_shown_and_not_interpreted(hostile: HostileStore) -> None:
    entries = hostile.entries_of()
    for entry in entries[2:]:
        entry["version"] = 2
    with hostile.written(entries):
        for line in VERBS:
            is_answered(hostile, line)
        assert "attempt-ended" in hostile.say("log bard")[1]
