"""Words of foreign origin stay words wherever a page, a form or a terminal shows them; Markdown: test_markdown_text."""

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cairn.flows.run.run_decisions import describe
from cairn.operations.trained_models import write_card
from cairn.reports.queries.receipts import read_receipts
from cairn.reports.queries.run_lookup import FoundCheckpoint, read_beat
from cairn.reports.queries.run_status import read_status
from cairn.reports.text.display_tables import budgets_table, markdown_table, receipts_table
from cairn.reports.text.progress import Progress
from cairn.storage.snapshots.snapshot_manifest import SnapshotSource
from cairn.tasks.text.format import sanitize, sanitize_json
from cairn.tasks.text.output import print_document, print_facts, print_table, say
from tests.entries import promoted
from tests.fabricated_run import FabricatedRun
from tests.storage.staged_snapshot import manifest_of

TAGS = (
    "<script>alert(1)</script><img src=x onerror=alert(1)> [a](javascript:alert(1)) ![b](https://example.org/x) | \n# h"
)
STEERING = "\x1b[2J\x1b]0;owned\x07\x9b2J\x00\u202e"


def stays_text(markdown: str) -> None:
    assert "<script" not in markdown and "<img" not in markdown
    assert not re.search(r"(?<!\\)\[a\]?", markdown), "a link"
    assert not re.search(r"(?<!\\)!\[", markdown), "a picture that is fetched"


def test_a_receipt_the_orchestrator_shows_holds_an_attempts_last_words_as_text(fresh: FabricatedRun) -> None:
    fresh.start()
    fresh.end("error", action="stop", detail=TAGS + STEERING)
    log = fresh.log
    for table in (receipts_table(read_receipts(log, read_beat(log))), budgets_table(read_status(log).budgets)):
        stays_text(markdown_table(table))


def test_the_form_that_asks_a_person_holds_an_evaluators_words_as_text() -> None:
    form = describe(promoted(metrics={TAGS: 1.0}, why=TAGS, verdict=TAGS), promoted(metrics={TAGS: 2.0}))
    stays_text(form)
    assert "2.0000" in form


@pytest.mark.parametrize(
    ("positions", "said"), [("learned", "positions are learned"), ("rotary", "it was trained on no longer texts")]
)
def test_a_model_card_says_how_its_positions_are_bounded(bard: FabricatedRun, positions: str, said: str) -> None:
    state = bard.log.refresh()
    assert state.opened is not None
    config = {**state.opened.config, "model": {**state.opened.config["model"], "positions": positions, "n_head": 1}}
    bard.log.state = replace(state, opened=replace(state.opened, config=config))
    assert f"8 tokens at once: {said}" in card_of(bard)


def card_of(bard: FabricatedRun) -> str:
    """The model card of the newest checkpoint, of a network and a snapshot that are nowhere."""
    state = bard.log.state
    assert state.newest_committed is not None
    source = SnapshotSource(name="a`b|c\x1b[2J\n", bytes=1, sha256="s", unit="line", documents=1)
    manifest = replace(manifest_of(train=2, val=2), sources=(source,))
    opened: Any = SimpleNamespace(
        snapshot=SimpleNamespace(manifest=manifest),
        network=SimpleNamespace(parameter_count=1),
        tokenizer=SimpleNamespace(end_of_text_id=0, decode=lambda ids: TAGS),
    )
    found = FoundCheckpoint(log=bard.log, reference=state.newest_committed.committed.reference)
    return write_card(found, opened, None, False)


def test_a_model_cards_front_matter_cannot_be_ended_from_inside(bard: FabricatedRun) -> None:
    state = bard.log.refresh()
    assert state.opened is not None
    family = 'x"\n---\n<script>'
    bard.log.state = replace(state, opened=replace(state.opened, model_family=family))
    card = card_of(bard)
    assert card.partition("\n\n")[0].count("\n---") == 1 and f"- {json.dumps(family)}\n---\n" in card
    assert "| `a'b\\|c` | 1 | 1 | `s` |" in card


@pytest.mark.parametrize(
    "words", [STEERING, "a\x08\x08b", "\x1bPq#0\x1b\\", "\x1b]8;;http" + "://x\x1b\\link\x1b]8;;\x1b\\", "\u2066x"]
)
def test_a_terminal_is_steered_by_nobody(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    say(words)
    print_table(("a",), [(words,)], empty="")
    print_facts([("a", words)])
    print_document({"a": words})
    shown = "".join(capsys.readouterr())
    assert [char for char in shown if not char.isprintable() and char != "\n"] == []


def test_a_fact_cannot_write_another_fact(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts([("next", "nothing\nstate  finished")])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_progress_steers_no_terminal() -> None:
    shown = io.StringIO()
    Progress(10, console=Console(file=shown, force_terminal=False)).say(f"attempt 1 ended: {STEERING}")
    assert shown.getvalue().strip().isprintable()


def test_json_with_numbers_for_characters_is_the_same_json() -> None:
    words = TAGS + STEERING + "\u00ad\u200d\u2028\ufeff äß→"
    shown = sanitize_json(json.dumps({"a": words}, ensure_ascii=False))
    assert json.loads(shown) == {"a": words} and "äß→" in shown
    assert not any(char in shown for char in "\x9b\u202e\u200d\u2028\ufeff")


@pytest.mark.parametrize("words", ["plain", "two\nlines\tand a tab", "ünïcode → 日本語"])
def test_harmless_words_stay_as_they_are(words: str) -> None:
    assert sanitize(words) == words
