"""How a flow run ends in Prefect, under a name that its pages look for, also where its server comes late."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from cairn.flows.orchestrator import flow_run
from cairn.flows.orchestrator.flow_run import completed, reason_of, shown_state
from cairn.flows.orchestrator.run_overview import artifact_key, flow_run_name
from cairn.storage.errors import IntegrityError
from cairn.tasks.errors import BudgetExhausted, ConfigDrift, InvalidConfiguration, LiveOwner
from cairn.tasks.policy.termination import EXIT_CODES, FlowEnd, FlowOutcome, flow_outcome

NAMES_OF_PREFECTS_PAGES = {"Completed", "Cancelled", "Crashed", "Failed", "TimedOut"}
"""The names of ended flow runs for which the deployment page of both pages asks."""


ENDS = set(FlowOutcome) - {FlowOutcome.PAUSED}


@pytest.mark.parametrize("reason", [*sorted(ENDS), "config-drift", "evaluator-failed", "sweep-failed"])
def test_every_end_has_a_name_that_prefects_pages_list(reason: str) -> None:
    state = shown_state(FlowEnd(reason=reason, message="why"))
    assert state.name in NAMES_OF_PREFECTS_PAGES
    assert state.name.upper() == state.type


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (FlowOutcome.PREEMPTED, "Crashed"),
        (FlowOutcome.FENCED, "Cancelled"),
        (FlowOutcome.PAUSED, "Suspended"),
        (reason_of(LiveOwner("why")), "Cancelled"),
        (FlowOutcome.BUDGET_EXHAUSTED, "Failed"),
        ("integrity", "Failed"),
    ],
)
def test_the_reason_stands_first_in_the_message(reason: str, name: str) -> None:
    state = shown_state(FlowEnd(reason=reason, message="why"))
    assert (state.name, state.message) == (name, f"{reason}: why")


@pytest.mark.parametrize(
    ("reason", "charged", "is_spent", "outcome"),
    [
        ("lost", "lost", True, "budget-exhausted"),
        ("bad-data", None, False, "bad-data"),
        ("oom", "oom", False, "oom"),
        ("error", None, False, "error"),
        ("storage", None, False, "storage"),
    ],
)
def test_a_flow_run_ends_by_its_budget_only_where_that_is_spent_else_by_the_reason_of_its_attempt(
    reason: str, charged: str | None, is_spent: bool, outcome: str
) -> None:
    assert flow_outcome(reason, "stop", charged, is_spent=is_spent) == outcome
    assert EXIT_CODES[outcome] in (1, 4, 75)


def test_a_completed_flow_run_says_only_what_it_did() -> None:
    assert shown_state(completed("done")).message == "done"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BudgetExhausted, "budget-exhausted"),
        (ConfigDrift, "config-drift"),
        (InvalidConfiguration, "invalid-configuration"),
        (IntegrityError, "integrity"),
    ],
)
def test_a_refusal_has_its_errors_words_as_reason(error: type[Exception], reason: str) -> None:
    assert reason_of(error("why")) == reason


def test_no_two_runs_share_the_key_of_an_artifact() -> None:
    runs = ["a-b", "a_b", "A.b", "a--b", "a-b-"]
    assert len({artifact_key(run) for run in runs}) == len(runs)
    assert artifact_key("a-b") == "cairn-a-b"
    assert artifact_key("a-b", "evaluations") == "cairn-a-b-evaluations"


def test_a_flow_run_is_named_after_run_and_attempt_in_ascii() -> None:
    assert flow_run_name("first-try", 3) == "first-try, attempt 3"
    assert flow_run_name("first-try", 0) == "first-try"


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
