"""`cairn note`: notes and tags of a person, in the log of a run that may train on meanwhile, and where they are."""

import json
from pathlib import Path

import pytest

from cairn.storage.errors import WriterTooOld
from cairn.storage.logs import run_log
from cairn.storage.logs.log_entry import Writer
from cairn.storage.logs.run_entries import RUN_KINDS
from cairn.storage.logs.run_note import MOST_TAGS, RunNoted
from cairn.storage.stores.local_store import LocalStore
from tests.cairn.live_server import served
from tests.commands import Cairn
from tests.entries import opened, writer
from tests.fabricated_run import FabricatedRun
from tests.storage.builders import entry_log

WORDS = "the rate was too high"


@pytest.fixture
def noted(bard: FabricatedRun, cairn: Cairn) -> FabricatedRun:
    """The run with a note and two tags."""
    assert cairn("note", "bard", *WORDS.split(), "--tag", "baseline", "--tag", "v1.0").code == 0
    return bard


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("status bard", (WORDS, "baseline", "v1.0")),
        ("report bard", (WORDS, "baseline", "v1.0")),
        ("note bard", (WORDS, "baseline", "v1.0")),
        ("runs", ("baseline", "v1.0")),
        ("sql select text from notes", (WORDS,)),
        ("sql select unnest(tags) from runs", ("baseline", "v1.0")),
    ],
)
@pytest.mark.usefixtures("noted")
def test_a_note_and_its_tags_are_shown(cairn: Cairn, line: str, shown: tuple[str, ...]) -> None:
    out = cairn(*line.split(" ", 1)).out
    assert [words for words in shown if words not in out] == []


@pytest.mark.usefixtures("noted")
def test_the_live_page_shows_notes_and_tags_and_finds_a_run_by_its_tag(store: LocalStore, tmp_path: Path) -> None:
    with served(store, tmp_path / "work") as live:
        run, found, none = (live.ask(path).text for path in ("/runs/bard", "/?q=v1.0", "/?q=v2.0"))
    assert WORDS in run and '<span class="tag">baseline</span>' in run and '<span class="tag">v1.0</span>' in found
    assert "No run matches" in none


@pytest.mark.usefixtures("noted")
def test_a_tag_is_taken_away_and_stays_in_the_log(cairn: Cairn, noted: FabricatedRun) -> None:
    assert json.loads(cairn("note", "bard", "--untag", "v1.0", "--json").out)["tags"] == ["baseline"]
    notes = [entry.body for entry in noted.log.read_entries() if isinstance(entry.body, RunNoted)]
    assert [note.tags for note in notes] == [("baseline", "v1.0"), ()]


def test_alone_it_writes_nothing(noted: FabricatedRun, cairn: Cairn) -> None:
    before = len(noted.log.read_entries())
    assert cairn("note", "bard").code == 0 and len(noted.log.read_entries()) == before


def test_an_attempt_trains_on_over_a_note(noted: FabricatedRun, cairn: Cairn) -> None:
    cairn("note", "bard", "it still trains")
    noted.commit(40)  # by a log that has not seen the note: the race is lost once, and decided again
    state = noted.log.state
    assert (state.newest_committed and state.newest_committed.committed.step, len(state.refused)) == (40, 0)
    assert [note.text for note in state.notes] == [WORDS, "it still trains"]


@pytest.mark.usefixtures("noted")
def test_a_fork_inherits_neither_notes_nor_tags(cairn: Cairn, store: LocalStore) -> None:
    run_log.RunLog(store, "branch").append(lambda _: opened("branch"), writer=writer())
    assert json.loads(cairn("status", "branch", "--json").out)["notes"] == []


def test_a_note_steers_no_terminal_and_repeats_no_password(bard: FabricatedRun, cairn: Cairn) -> None:
    cairn("note", "bard", "evil \x1b[31mred\x07 \x9b2J http" + "://me:secret@host/x", "\u202eback")
    (stored,) = bard.log.refresh().notes
    assert stored.text == "evil red\ufffd \ufffd2J http" + "://host/x \ufffdback"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x" * 2001], "a note of 2,001 characters: must have at most 2,000"),
        (["--tag", "a b"], "tag 'a b': must be letters"),
        (["--tag", "-x"], "--tag: needs a value"),
        (["--tag", ""], "tag '': must be letters"),
        (["--tag", "a/b"], "tag 'a/b': must be letters"),
        (["--tag", "y" * 41], "must have at most 40 characters"),
        (["--untag", "gone"], "--untag gone: run bard has no such tag; rule: one of none"),
        ([word for n in range(MOST_TAGS + 1) for word in ("--tag", f"t{n}")], "a run has at most 20 tags"),
    ],
)
def test_what_cannot_be_noted_is_refused_in_one_line(
    bard: FabricatedRun, cairn: Cairn, arguments: list[str], said: str
) -> None:
    ended = cairn("note", "bard", *arguments)
    assert (ended.code, said in ended.err, len(ended.err.splitlines())) == (2, True, 1), ended.err
    assert not bard.log.refresh().notes and not bard.log.state.tags


def test_a_run_that_nobody_noted_is_read_as_before_and_a_program_before_notes_reads_on(
    noted: FabricatedRun, store: LocalStore
) -> None:
    kinds = {name: kind for name, kind in RUN_KINDS.items() if name != "run-noted"}
    older = run_log.RunLog(store, "bard", log=entry_log(store, "runs/bard/log", kinds))
    assert older.refresh().newest_committed == noted.log.refresh().newest_committed
    with pytest.raises(WriterTooOld, match="seq 10 is a run-noted"):
        older.append(lambda state: opened("bard"), writer=Writer(host="here", pid=1))
