"""What a person does to an alias and sees of it: who, when, why; undone decisions stay visible; nothing unreadable is
gone back to.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.flows.run.run_decisions import PromotionApproval, ask, describe
from cairn.operations.person_decisions import roll_back
from cairn.reports.queries.alias_history import list_decisions, list_promotions
from cairn.storage.checkpoints.resume_point import quarantine_checkpoint
from cairn.storage.errors import IntegrityError
from cairn.storage.logs.log_entry import Writer
from cairn.storage.logs.registry import Promoted, Registry
from cairn.storage.stores.local_store import LocalStore
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun, promote

HUMAN = Writer(host="here", pid=1)


@pytest.fixture
def three(bard: FabricatedRun, store: LocalStore) -> FabricatedRun:
    """The run whose steps 10, 20 and 30 were each the champion, in that order."""
    promote(store, "bard", bard.log.state.readable[0].committed.reference, loss=1.0, alias="champion")
    return bard


def champion(store: LocalStore) -> Promoted:
    body = Registry(store, "champion").refresh().champion
    assert body is not None
    return body


def test_rolling_back_twice_walks_back_twice(three: FabricatedRun, store: LocalStore) -> None:
    steps = [roll_back(store, "champion", by="ann").step for _ in range(2)]
    assert (steps, champion(store).step) == ([20, 10], 10)


def test_a_rollback_says_who_why_and_what_it_left(three: FabricatedRun, cairn: Cairn, store: LocalStore) -> None:
    assert cairn("rollback", "--why", "it repeats itself").code == 0
    view = list_decisions(store)[0]
    assert (view.kind, view.step, view.why) == (
        "rolled-back",
        20,
        "from bard@30 back to bard@20: it repeats itself",
    )
    assert "@" in view.by and view.previous == three.log.state.readable[0].committed.manifest_sha256


def test_a_rollback_passes_over_weights_that_are_quarantined(three: FabricatedRun, store: LocalStore) -> None:
    broken = three.log.state.readable[1].committed
    quarantine_checkpoint(three.log, broken, "a flipped byte", writer=HUMAN)
    assert roll_back(store, "champion", by="ann").step == 10
    assert [view.step for view in list_promotions(store)] == [10]


def test_a_rollback_passes_over_weights_whose_bytes_are_gone(three: FabricatedRun, store: LocalStore) -> None:
    store.delete(f"{three.log.state.readable[1].committed.prefix}/weights-00001-of-00001.safetensors")
    assert roll_back(store, "champion", by="ann").step == 10


def test_a_rollback_to_nothing_that_can_be_read_is_refused_and_says_what_is_wrong(
    three: FabricatedRun, cairn: Cairn, store: LocalStore
) -> None:
    for record in three.log.state.readable[1:]:
        store.delete(f"{record.committed.prefix}/manifest.json")
    with pytest.raises(IntegrityError, match=r"bard@20 has no manifest.*bard@10 has no manifest"):
        roll_back(store, "champion", by="ann")
    assert (cairn("rollback").code, champion(store).step) == (5, 30)


def test_the_history_keeps_what_was_undone_and_what_was_refused(
    three: FabricatedRun, cairn: Cairn, store: LocalStore
) -> None:
    roll_back(store, "champion", by="ann")
    assert cairn("promote", "bard@10", "--why", "nostalgia").code == 3
    views = list_decisions(store)
    assert [(view.kind, view.step, view.gate) for view in views] == [
        ("refused", 10, "better"),
        ("rolled-back", 20, None),
        ("promoted", 30, None),
        ("promoted", 20, None),
        ("promoted", 10, None),
    ]
    assert (views[0].why, "must be below" in (views[0].detail or "")) == ("nostalgia", True)


def test_the_history_as_text_has_every_decision(three: FabricatedRun, cairn: Cairn) -> None:
    assert cairn("models", "--history").out.count("promoted") >= 3


def test_a_promotion_by_hand_carries_the_persons_words(bard: FabricatedRun, cairn: Cairn, store: LocalStore) -> None:
    bard.evaluate(bard.log.state.readable[0].committed.reference, loss=1.0)
    assert cairn("promote", "bard@30", "--why", "it rhymes").code == 0
    assert champion(store).why == "val_loss 1.0000, before 2.0000: better by 1.0000, no error is known: it rhymes"


def test_nobody_is_asked_where_no_server_is_named(bard: FabricatedRun, store: LocalStore) -> None:
    run: Any = SimpleNamespace(flow_run_id="0" * 8 + "-0000-0000-0000-" + "0" * 12)
    answer = ask(run, Registry(store, "champion"), champion(store), 60)
    assert isinstance(answer, str) and "PREFECT_API_URL" in answer


def test_the_question_shows_both_checkpoints_with_their_numbers(bard: FabricatedRun, store: LocalStore) -> None:
    text = describe(champion(store), champion(store))
    assert "| val_loss | 2.0000 | 2.0000 |" in text and "bard@20" in text


def test_the_form_wants_a_name() -> None:
    with pytest.raises(ValueError, match="by"):
        PromotionApproval(approve=True, by="")


def test_reading_the_history_needs_no_folder_of_the_runs(
    three: FabricatedRun, store: LocalStore, tmp_path: Path
) -> None:
    for key in store.keys("runs"):
        store.delete(key)
    assert len(list_decisions(store)) == 3
