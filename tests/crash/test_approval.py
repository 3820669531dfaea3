"""A person has the last word: asked in a real Prefect, for a run that is trained; whatever is answered is on record."""

import json
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from storage.logs.registry import Promoted, Registry, RegistryState
from tests.crash.training_command import Command
from tests.crash.victims import kill_flow, wait_for

pytestmark = pytest.mark.xdist_group("approval")  # its run is made once for all its tests
ASKED = re.compile(r"resume flow run ([0-9a-f-]{36}) in")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> Command:
    """A finished run nobody was asked about; each test offers it to an alias of its own."""
    command = Command(tmp_path_factory.mktemp("approval"), api_url)
    command.train("--set", "promotion.alias=first")
    return command


def offering(alias: str, seconds: float = 300) -> tuple[str, ...]:
    named = ("alias=" + alias, "require_approval=true", f"approval_timeout_seconds={seconds}")
    return tuple(word for setting in named for word in ("--set", f"promotion.{setting}"))


def registry(command: Command, alias: str) -> RegistryState:
    return Registry(command.store, alias).refresh()


def asked(command: Command, alias: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start the command; returns once it waits for a person, with the flow run's id."""
    process = command.start(*offering(alias))
    assert wait_for(lambda: ASKED.search(command.output()) is not None, process, "the question"), command.output()
    return process, ASKED.findall(command.output())[-1]


def answer(api_url: str, flow_run_id: str, **run_input: Any) -> dict[str, Any]:
    """Answer as both UIs and `resume_flow_run(id, run_input=…)` do, again where the server's database was locked."""
    body = json.dumps({"run_input": run_input}).encode()
    request = urllib.request.Request(
        f"{api_url}/flow_runs/{flow_run_id}/resume", data=body, headers={"Content-Type": "application/json"}
    )
    for pause in (0.5, 1.0, 2.0, 4.0, 8.0):
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                answered: dict[str, Any] = json.load(response)
                return answered
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            time.sleep(pause)
    raise AssertionError("the server's database stayed locked")


def test_a_yes_promotes_in_the_name_of_the_person(trained: Command, api_url: str) -> None:
    process, flow_run_id = asked(trained, "approved")
    assert registry(trained, "approved").history == ()
    answer(api_url, flow_run_id, approve=True, by="ann", why="it rhymes")
    assert process.wait(timeout=60) == 0, trained.output()
    champion = registry(trained, "approved").champion
    assert champion is not None
    assert (champion.run_id, champion.by, champion.why.endswith(": it rhymes")) == ("bard", "ann", True)


@pytest.mark.slow
def test_a_no_is_a_refusal_with_who_and_why_and_nobody_is_asked_again(trained: Command, api_url: str) -> None:
    process, flow_run_id = asked(trained, "denied")
    answer(api_url, flow_run_id, approve=False, by="ann", why="it insults people")
    assert process.wait(timeout=60) == 0, trained.output()
    trained.train(*offering("denied"))
    assert "refused step 60 before" in trained.output()
    ((_, refused),) = registry(trained, "denied").refusals
    assert (refused.gate, refused.by, "it insults people" in refused.detail) == ("approved", "ann", True)
    assert len(registry(trained, "denied").history) == 1


@pytest.mark.slow
def test_a_form_without_a_name_is_not_accepted(trained: Command, api_url: str) -> None:
    process, flow_run_id = asked(trained, "anonymous")
    assert answer(api_url, flow_run_id, approve=True)["status"] == "REJECT"
    assert process.poll() is None
    answer(api_url, flow_run_id, approve=False, by="ann")
    assert process.wait(timeout=60) == 0


def test_a_day_without_an_answer_leaves_the_alias_alone_and_a_person_who_types_promote_approves(
    trained: Command,
) -> None:
    trained.train(*offering("unanswered", seconds=1))
    assert "waits for approval (nobody answered in Prefect within 1 s)" in trained.output()
    assert registry(trained, "unanswered").history == ()
    typed = trained.start_verb("promote", "bard@60", "--alias", "unanswered", "--why", "I have read it")
    assert typed.wait(timeout=60) == 0
    champion = registry(trained, "unanswered").champion
    assert champion is not None and champion.why.endswith(": I have read it")


def test_nobody_is_waited_for_where_only_the_command_knows_the_server(trained: Command) -> None:
    process = trained.start_verb("train", "run.toml", "--run-id", "bard", *offering("alone"), PREFECT_API_URL="")
    assert process.wait(timeout=120) == 0, trained.output()
    assert "no Prefect server is named" in trained.output()
    assert registry(trained, "alone").history == ()


@pytest.mark.slow
def test_promote_in_another_terminal_ends_the_waiting(trained: Command) -> None:
    process, _ = asked(trained, "elsewhere")
    assert trained.start_verb("promote", "bard@60", "--alias", "elsewhere").wait(timeout=60) == 0
    assert process.wait(timeout=60) == 0
    assert [type(body) for _, body in registry(trained, "elsewhere").history] == [Promoted]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_notice_while_a_person_is_waited_for_ends_the_command_resumable(
    trained: Command, number: signal.Signals, code: int
) -> None:
    process, _ = asked(trained, number.name)
    process.send_signal(number)
    assert process.wait(timeout=60) == code, trained.output()
    assert registry(trained, number.name).history == ()


def test_a_run_killed_between_its_end_and_its_promotion_is_promoted_by_the_same_command(
    command: Command, tmp_path: Path
) -> None:
    process = command.start()
    has_finished: Callable[[], bool] = lambda: command.state().finished is not None  # noqa: E731
    wait_for(has_finished, process, "the end")
    kill_flow(process)
    process.wait()
    assert registry(command, "champion").history == ()
    command.train()
    assert [type(body) for _, body in registry(command, "champion").history] == [Promoted]
