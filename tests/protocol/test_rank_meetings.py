"""Ranks that die, in every schedule of a few steps: none is left behind, none updates twice, none waits for ever."""

from dataclasses import replace

import pytest

from cairn.model.training import membership
from cairn.model.training.membership import Position
from tests.full_amount import FULL
from tests.protocol import rank_meetings
from tests.protocol.rank_meetings import Broken, Member, World, begin, explore

QUICK = [(3, 1, 0, 0, 1), (2, 1, 1, 0, 2), (2, 1, 0, 1, 1), (2, 0, 1, 1, 1)]
"""Ranks, deaths, connections that fail for no reason, ranks that join, steps."""
LONG = [
    *((3, 1, 0, 0, 2), (3, 2, 0, 0, 1), (3, 1, 1, 0, 1), (3, 2, 0, 0, 2), (4, 1, 0, 0, 1), (3, 2, 1, 0, 1)),
    *((2, 1, 0, 1, 2), (2, 0, 0, 2, 2), (2, 2, 0, 1, 1), (2, 1, 1, 1, 1), (3, 0, 0, 1, 1), (3, 1, 0, 1, 1)),
]


@pytest.mark.parametrize(("ranks", "deaths", "failures", "joiners", "steps"), QUICK + LONG * FULL)
def test_whenever_ranks_die_or_join_all_that_are_there_make_every_update_once(
    ranks: int, deaths: int, failures: int, joiners: int, steps: int
) -> None:
    assert explore(begin(ranks, deaths, failures, joiners), steps) > 1000


def test_the_model_finds_a_state_that_is_taken_for_handed_over_before_all_know(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = rank_meetings.complete

    def without_a_round(world: World, rank: int, member: Member, is_wished: bool) -> Member:
        after = complete(world, rank, member, is_wished)
        if member.kind != "H":
            return after
        position = replace(after.position, rounds=max(0, after.position.rounds), members=member.group)
        return replace(after, position=position, is_admitting=False, has_handed=False)

    monkeypatch.setattr(rank_meetings, "complete", without_a_round)
    with pytest.raises((Broken, membership.RanksApart)):
        explore(begin(2, 1, 0, 1), 2)


def test_the_model_finds_an_admission_that_some_do_not_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_admission = rank_meetings.begin_admission
    monkeypatch.setattr(
        rank_meetings, "begin_admission", lambda member: replace(begin_admission(member), met=member.admissions + 1)
    )
    with pytest.raises((Broken, membership.RanksApart)):
        explore(begin(2, 0, 0, 1), 2)


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
