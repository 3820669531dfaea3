"""A step is performed by its own function, whatever Prefect makes of its task run."""

from typing import Any

import pytest
from prefect import Task

from cairn.flows.run.steps import as_task


def test_a_step_is_performed_once_although_the_task_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    performed: list[int] = []

    def step(number: int) -> int:
        performed.append(number)
        return number + 1

    def fail(self: Task[..., Any], *arguments: Any, **named: Any) -> Any:
        raise RuntimeError("no server")

    monkeypatch.setattr(Task, "__call__", fail)
    assert as_task(Task(fn=step))(4) == 5
    assert performed == [4]


def test_a_value_is_the_functions_although_its_task_run_cannot_end(monkeypatch: pytest.MonkeyPatch) -> None:
    performed: list[int] = []

    def step(number: int) -> int:
        performed.append(number)
        return number + 1

    def fail_late(self: Task[..., Any], *arguments: Any, **named: Any) -> Any:
        self.fn(*arguments)
        raise RuntimeError("the server has gone")

    monkeypatch.setattr(Task, "__call__", fail_late)
    assert as_task(Task(fn=step))(4) == 5
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
        as_task(Task(fn=step))(4)
