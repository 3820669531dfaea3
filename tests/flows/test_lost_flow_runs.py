"""Whose flow runs are ended in the orchestrator: those of lost attempts, and nobody else's."""

from datetime import UTC, datetime
from uuid import UUID

import pytest

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


@pytest.mark.parametrize(
    ("attempts", "closed"),
    [
        pytest.param([(1, "lost"), (999, None)], [1], id="that of a lost attempt is closed"),
        pytest.param([(1, "lost"), (1, "completed"), (999, None)], [], id="one that went on after it is alive"),
        pytest.param(
            [(1, "preempted"), (2, "cancelled"), (3, "error"), (999, None)], [], id="who left in order says so itself"
        ),
        pytest.param([(999, "lost"), (999, None)], [], id="one's own is never closed"),
        pytest.param([(None, "lost"), (999, None)], [], id="without a flow run there is nothing to close"),
    ],
)
def test_of_the_flow_runs(attempts: list[tuple[int | None, str | None]], closed: list[int]) -> None:
    assert lost(*attempts) == closed


def test_after_many_kills_only_the_newest_are_asked_about() -> None:
    assert lost(*((number, "lost") for number in range(1, 100))) == list(range(99, 99 - MOST_LOST_FLOW_RUNS, -1))
