"""A witness writes what it can: of a run whose server comes late, the end is shown whatever was left out before."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from cairn.flows.orchestrator import flow_run
from cairn.flows.orchestrator.flow_run import completed


class LateServer:
    """Answers once it is let go."""

    is_lost = False
    say = print

    def __init__(self) -> None:
        self.begun = threading.Event()

    def wait_ready(self) -> bool:
        return self.begun.wait(60)


class Client:
    """Notes the states that a flow run is set to, and the lines it is sent."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.lines = 0

    def create_flow_run(self, *given: object, **named: object) -> SimpleNamespace:
        return SimpleNamespace(id=UUID(int=1))

    def create_logs(self, lines: list[object]) -> None:
        self.lines += len(lines)

    def read_flow_run(self, flow_run_id: UUID) -> SimpleNamespace:
        return SimpleNamespace(id=flow_run_id, tags=["run:bard"])

    def update_flow_run(self, flow_run_id: UUID, tags: list[str]) -> None:
        self.tags = tags

    def set_flow_run_state(self, flow_run_id: UUID, state: Any, force: bool) -> None:
        self.states.append(state.name)


def test_the_end_is_shown_though_lines_were_left_out_while_the_server_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = Client(), LateServer()

    @contextmanager
    def connected(**_: object) -> Iterator[Client]:
        yield client

    monkeypatch.setattr(flow_run, "get_client", connected)
    monkeypatch.setattr(flow_run, "_QUEUED", 3)
    given: Any = server
    witness = flow_run.Witness(SimpleNamespace(), "bard", {}, given)  # type: ignore[arg-type]
    for number in range(10):
        witness._log(f"line {number}")
    threading.Timer(0.0, server.begun.set).start()
    witness.finish(completed("done"), at_once=False)
    assert (client.lines, client.states, client.tags) == (3, ["Completed"], ["reason:completed", "run:bard"])
