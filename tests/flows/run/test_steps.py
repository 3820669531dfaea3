"""A step is performed by its own function, whatever Prefect makes of its task run; of many segments few are shown."""

from typing import Any

import pytest
from prefect import State, Task

from cairn.flows.run.steps import MOST_TASK_RUNS, Chain
from cairn.flows.train_gpt import is_shown
from cairn.tasks import promote, train_segment
from cairn.tasks.evaluate import Interrupted
from cairn.tasks.train_segment import Segment


@pytest.mark.parametrize("ends_late", [False, True], ids=["the task engine fails", "its task run cannot end"])
def test_a_step_is_performed_once_and_its_value_is_the_functions_although(
    monkeypatch: pytest.MonkeyPatch, ends_late: bool
) -> None:
    performed: list[int] = []

    def step(number: int) -> int:
        performed.append(number)
        return number + 1

    def fail(self: Task[..., Any], *arguments: Any, **named: Any) -> Any:
        if ends_late:
            self.fn(*arguments)
        raise RuntimeError("the server has gone")

    monkeypatch.setattr(Task, "__call__", fail)
    assert Chain().as_task(Task(fn=step))(4) == 5
    assert performed == [4]


def test_an_error_is_the_functions_although_its_task_run_cannot_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(number: int) -> int:
        raise KeyError(number)

    def swallow(self: Task[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            self.fn(*arguments)
        except KeyError:
            raise RuntimeError("the server has gone") from None

    monkeypatch.setattr(Task, "__call__", swallow)
    with pytest.raises(KeyError, match="4"):
        Chain().as_task(Task(fn=step))(4)


def test_a_flow_run_has_at_most_sixty_task_runs_of_which_the_last_is_the_promotions() -> None:
    chain = Chain()
    admitted = [chain.admit(train_segment.train_segment) for _ in range(200)]
    assert admitted == [True] * 59 + [False] * 141 and MOST_TASK_RUNS == 60
    assert [chain.admit(promote.promote) for _ in range(2)] == [True, False]


def test_a_step_that_is_not_shown_any_more_is_performed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Task, "__call__", lambda *given, **named: pytest.fail("shown"))
    chain = Chain()
    for _ in range(MOST_TASK_RUNS):
        chain.admit(train_segment.train_segment)
    assert chain.as_task(Task(fn=lambda number: number + 1))(4) == 5


def test_a_task_run_ends_in_the_state_that_the_value_of_its_step_deserves(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[State[Any]] = []

    def note(self: Task[..., Any], *arguments: Any, **named: Any) -> State[Any]:
        ended.append(self.fn(*arguments))
        return ended[-1]

    monkeypatch.setattr(Task, "__call__", note)
    value = Interrupted(why="the run goes on")
    assert Chain().as_task(Task(fn=lambda number: value))(4) is value
    assert [(state.is_cancelled(), state.message) for state in ended] == [(True, "the run goes on")]


MOST = 20
"""Groups of a segment, its commit and its evaluation: at most sixty task runs a flow run."""


def shown(total: int, every: int) -> list[int]:
    """Return the ends of the segments that are shown."""
    segments = (Segment(attempt=1, first=first, until=min(first + every, total)) for first in range(0, total, every))
    return [segment.until for segment in segments if is_shown(segment, total)]


@pytest.mark.parametrize(("total", "every"), [(60, 5), (2_000, 1), (1_000_000, 997), (100, 99), (19, 1)])
def test_at_most_twenty_segments_are_shown_the_first_and_the_last_among_them(total: int, every: int) -> None:
    ends = shown(total, every)
    assert len(ends) <= MOST and ends[0] == min(every, total) and ends[-1] == total


def test_every_segment_of_a_short_run_is_shown() -> None:
    assert shown(60, 5) == list(range(5, 61, 5))


def test_a_checkpoint_without_steps_is_shown_like_the_step_that_it_is_of() -> None:
    assert not is_shown(Segment(attempt=1, first=7, until=7), 2_000)
