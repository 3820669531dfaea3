"""Ranks that die, in every schedule of a few steps: none is left behind, none updates twice, none waits for ever."""

import pytest

from cairn.model.training import membership
from cairn.model.training.membership import Position
from tests.full_amount import FULL
from tests.protocol import rank_meetings
from tests.protocol.rank_meetings import Broken, begin, explore

QUICK = [(3, 1, 0, 2), (2, 1, 1, 2)]
"""Ranks, deaths, connections that fail for no reason, steps."""
LONG = [(3, 2, 0, 1), (3, 1, 1, 1), (3, 2, 0, 2), (4, 1, 0, 1), (3, 2, 1, 1)]


@pytest.mark.parametrize(("ranks", "deaths", "failures", "steps"), QUICK + LONG * FULL)
def test_whenever_ranks_die_those_left_make_every_update_once(
    ranks: int, deaths: int, failures: int, steps: int
) -> None:
    assert explore(begin(ranks, deaths, failures), steps) > 1000


def test_the_model_finds_a_rank_that_repeats_a_step_whose_update_others_have_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_meetings, "newest_position", lambda positions: min(positions, key=lambda one: one.rounds))
    with pytest.raises(Broken):
        explore(begin(3, 1), 1)


def test_the_model_finds_ranks_without_work_that_do_not_come_to_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_meetings, "is_called", lambda world, member: False)
    with pytest.raises(Broken, match="all wait"):
        explore(begin(3, 1), 1)


def test_the_model_finds_meetings_that_are_not_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_meetings, "next_meeting", lambda last, changes: (changes, 0))
    with pytest.raises((Broken, membership.RanksApart)):
        explore(begin(3, 1, 1), 1)


def test_ranks_more_than_a_round_apart_do_not_go_on() -> None:
    with pytest.raises(membership.RanksApart, match=r"\[3, 5\]"):
        membership.newest_position([Position(rounds=3), Position(rounds=5)])
