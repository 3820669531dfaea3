"""A step is performed by its own function, whatever Prefect makes of its task run."""

from typing import Any

import pytest
from prefect import State, Task

from cairn.flows.run.steps import MOST_TASK_RUNS, Chain
from cairn.tasks import promote, train_segment
from cairn.tasks.evaluate import Interrupted


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
