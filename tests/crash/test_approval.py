"""A person has the last word: asked in a real Prefect, for a run that is trained; whatever is answered is on record."""

import shutil
import signal

import pytest

from cairn.storage.logs.registry import Promoted
from tests.crash.approval import answer, asked, offering, registry
from tests.crash.prefect_api import ask, log_of
from tests.crash.shown_run import ShownRun, flow_run_of
from tests.crash.training_command import Command
from tests.entries import refusals
from tests.processes.waiting import patience_seconds, wait_for

pytestmark = pytest.mark.xdist_group("approval")  # its run is made once for all its tests
LOGGED = {"PREFECT_LOGGING_LEVEL": "INFO", "PREFECT_LOGGING_TO_API_ENABLED": "true"}
"""What makes a command of this session write its flow run's log, which it does not by itself."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, undisturbed: Command, api_url: str) -> Command:
    """A copy of the run nobody touched; each test offers it to an alias of its own."""
    folder = tmp_path_factory.mktemp("approval") / "run"
    shutil.copytree(undisturbed.folder, folder)
    return Command(folder, api_url)


def test_a_yes_promotes_in_the_name_of_the_person(trained: Command, api_url: str) -> None:
    process, flow_run_id = asked(trained, "approved")
    assert registry(trained, "approved").history == ()
    answer(api_url, flow_run_id, approve=True, by="ann", why="it rhymes")
    assert process.wait(timeout=patience_seconds()) == 0, trained.output()
    champion = registry(trained, "approved").champion
    assert champion is not None
    assert (champion.run_id, champion.by, champion.why.endswith(": it rhymes")) == ("bard", "ann", True)


@pytest.mark.slow
def test_a_no_is_a_refusal_with_who_and_why_and_nobody_is_asked_again(trained: Command, api_url: str) -> None:
    process, flow_run_id = asked(trained, "denied", **LOGGED)
    answer(api_url, flow_run_id, approve=False, by="ann", why="it insults people")
    assert process.wait(timeout=patience_seconds()) == 0, trained.output()
    trained.train(*offering("denied"))
    assert "refused step 60 before" in trained.output()
    (refused,) = refusals(registry(trained, "denied"))
    assert (refused.gate, refused.by, "it insults people" in refused.detail) == ("approved", "ann", True)
    assert len(registry(trained, "denied").history) == 1
    rule = {"task_runs": {"name": {"like_": "promote step 60 to denied"}}}
    (task_run,) = ask(api_url, "task_runs/filter", rule)
    assert (task_run["state_type"], task_run["state_name"]) == ("COMPLETED", "Refused")
    assert "it insults people" in task_run["state"]["message"]
    log = log_of(api_url, flow_run_id)
    assert log and "Traceback" not in log


@pytest.mark.slow
def test_a_form_without_a_name_is_not_accepted(trained: Command, api_url: str) -> None:
    process, flow_run_id = asked(trained, "anonymous")
    assert answer(api_url, flow_run_id, approve=True)["status"] == "REJECT"
    assert process.poll() is None
    answer(api_url, flow_run_id, approve=False, by="ann")
    assert process.wait(timeout=patience_seconds()) == 0


def test_a_day_without_an_answer_leaves_the_alias_alone_and_a_person_who_types_promote_approves(
    trained: Command,
) -> None:
    trained.train(*offering("unanswered", seconds=1))
    assert "waits for approval (nobody answered in Prefect within 1 s)" in trained.output()
    assert registry(trained, "unanswered").history == ()
    typed = trained.start_verb("promote", "bard@60", "--alias", "unanswered", "--why", "I have read it")
    assert typed.wait(timeout=patience_seconds()) == 0
    champion = registry(trained, "unanswered").champion
    assert champion is not None and champion.why.endswith(": I have read it")


@pytest.mark.slow
def test_promote_in_another_terminal_ends_the_waiting(trained: Command) -> None:
    process, _ = asked(trained, "elsewhere")
    assert trained.start_verb("promote", "bard@60", "--alias", "elsewhere").wait(timeout=patience_seconds()) == 0
    assert process.wait(timeout=patience_seconds()) == 0
    assert [type(body) for _, body in registry(trained, "elsewhere").history] == [Promoted]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_notice_while_a_person_is_waited_for_ends_the_command_resumable(
    trained: Command, number: signal.Signals, code: int
) -> None:
    process, _ = asked(trained, number.name)
    process.send_signal(number)
    assert process.wait(timeout=patience_seconds()) == code, trained.output()
    assert registry(trained, number.name).history == ()


@pytest.mark.slow  # quick witness: `test_evaluation_run.py`, an interrupted one leaves nothing on record
def test_a_notice_during_the_last_evaluation_leaves_no_traceback_in_the_log(command: Command, api_url: str) -> None:
    process = command.start(CAIRN_FAULTS="pause-evaluator@1", **LOGGED)
    command.wait_for_fault("pause-evaluator@1", process)
    wait_for(lambda: command.state().finished is not None, process, "the end", command.output)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=patience_seconds()) == 75, command.output()
    log = log_of(api_url, flow_run_of(command))
    assert "Traceback" not in log + command.output()
    assert any(
        name.startswith("evaluate ") and state == "Cancelled" for name, state in ShownRun(command).task_runs().items()
    )
