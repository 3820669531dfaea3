"""Whose flow runs are ended in the orchestrator: those of lost attempts, and nobody else's."""

from datetime import UTC, datetime
from uuid import UUID

from cairn.flows.orchestrator.run_overview import MOST_LOST_FLOW_RUNS, lost_flow_runs
from cairn.storage.logs.fold_cache import History
from cairn.storage.logs.run_state import AttemptRecord, RunState
from tests import entries

MINE = UUID(int=999)


def attempt(number: int, flow_run: int | None, reason: str | None) -> AttemptRecord:
    return AttemptRecord(
        started=entries.started(number),
        flow_run_id=None if flow_run is None else str(UUID(int=flow_run)),
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        ended=None if reason is None else entries.ended(number, reason),
    )


def lost(*attempts: tuple[int | None, str | None]) -> list[int]:
    records = tuple(attempt(number, flow_run, reason) for number, (flow_run, reason) in enumerate(attempts, 1))
    return [flow_run_id.int for flow_run_id in lost_flow_runs(RunState(attempts=History(records)), MINE)]


def test_the_flow_run_of_a_lost_attempt_is_closed() -> None:
    assert lost((1, "lost"), (999, None)) == [1]


def test_a_flow_run_that_went_on_after_a_lost_attempt_is_alive() -> None:
    assert lost((1, "lost"), (1, "completed"), (999, None)) == []


def test_who_left_in_order_says_so_itself() -> None:
    assert lost((1, "preempted"), (2, "cancelled"), (3, "error"), (999, None)) == []


def test_ones_own_flow_run_is_never_closed() -> None:
    assert lost((999, "lost"), (999, None)) == []


def test_an_attempt_without_a_flow_run_is_nothing_to_close() -> None:
    assert lost((None, "lost"), (999, None)) == []


def test_after_many_kills_only_the_newest_are_asked_about() -> None:
    assert lost(*((number, "lost") for number in range(1, 100))) == list(range(99, 99 - MOST_LOST_FLOW_RUNS, -1))
