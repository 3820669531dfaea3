"""`make up` with the automations at work: what is killed goes on, what needs a person tells one. Real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.deployments.started_up import ROOT, SCRIPT, StartedUp, free_port, up_environment
from tests.processes.waiting import patience_seconds, wait_until
from tests.reports.webhook import Hook, serving_hook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("up")]
ENDLESS = 'overrides=["training.steps=100000"]'


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedUp]:
    """Everything `make up` starts."""
    started = StartedUp(tmp_path_factory.mktemp("up"))
    yield started
    started.stop(signal.SIGTERM)


@pytest.fixture
def hook() -> Iterator[Hook]:
    """An address to which alerts can be sent, and what was."""
    with serving_hook() as hook:
        yield hook


def pid_of_attempt(up: StartedUp, run_id: str, number: int) -> int:
    """Return the process of the run's attempt once it has committed."""

    def has_committed() -> bool:
        attempts = up.state(run_id).attempts
        return len(attempts) >= number and attempts[number - 1].last_committed_step is not None

    wait_until(has_committed, f"a commit of attempt {number} of {run_id}", up.output)
    return up.state(run_id).attempts[number - 1].started.placement.pid


def begin(up: StartedUp, run_id: str, *words: str) -> None:
    given = ("-p", f"config={up.config}", "-p", f"run_id={run_id}", *words)
    asked = up.prefect("deployment", "run", "train-gpt/train-gpt", *given)
    assert asked.returncode == 0, asked.stdout + asked.stderr


def looks(up: StartedUp) -> list[dict[str, Any]]:
    """The looks that an automation has started."""
    return [item for item in up.flow_runs("watch-runs") if (item["created_by"] or {}).get("type") == "AUTOMATION"]


def test_a_flow_run_killed_without_a_word_is_continued_by_the_automation_once(up: StartedUp) -> None:
    begin(up, "killed", "-p", ENDLESS)
    os.kill(pid_of_attempt(up, "killed", 1), signal.SIGKILL)
    second = pid_of_attempt(up, "killed", 2)
    assert len(looks(up)) == 1
    flow_runs = [item for item in up.flow_runs("train-gpt") if item["name"].startswith("killed, ")]
    assert {item["name"]: item["state_name"] for item in flow_runs} == {
        "killed, attempt 1": "Crashed",
        "killed, attempt 2": "Running",
    }
    before = len(looks(up))
    os.kill(second, signal.SIGTERM)
    pid_of_attempt(up, "killed", 3)
    assert len(looks(up)) == before  # its successor was named
    up.prefect("flow-run", "cancel", up.state("killed").attempts[-1].flow_run_id or "")
    wait_until(lambda: up.state("killed").open_attempt is None, "the end of the run", up.output)


def test_a_run_whose_budget_is_spent_tells_by_the_block_which_run_why_and_what_to_do(up: StartedUp, hook: Hook) -> None:
    make_block(up, hook.url)
    set_up = ("-m", "cairn.flows.orchestrator.server_setup", "--alert-block", "custom-webhook/mine")
    first, second = python(up, *set_up), python(up, *set_up)
    assert ("alert: sent by custom-webhook/mine" in first, second) == (True, "nothing to change\n")
    begin(up, "spent", "-p", 'overrides=["training.steps=100000", "budgets.lost.retries=0"]')
    for child in psutil.Process(pid_of_attempt(up, "spent", 1)).children(recursive=True):
        child.kill()
    wait_until(lambda: bool(hook.posted), "the alert", lambda: f"{up.output()}\n{up.state('spent').attempts}")
    (alert,) = hook.posted
    assert alert["title"] == "Cairn: spent, attempt 1: budget-exhausted"
    assert "spent, attempt 1 ended: budget-exhausted" in alert["text"] and "raise budgets.lost.retries" in alert["text"]


def test_a_flow_run_that_shows_no_life_is_looked_after_and_left_alone_where_its_process_lives(up: StartedUp) -> None:
    begin(up, "silent", "-p", ENDLESS)
    pid, before = pid_of_attempt(up, "silent", 1), len(looks(up))
    heartbeats = {"filter": {"event": {"name": ["prefect.flow-run.heartbeat"]}}, "limit": 50}
    wait_until(lambda: bool(up.ask("api/events/filter", heartbeats)["events"]), "a heartbeat", up.output)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: len(looks(up)) > before, "a look", up.output)
        wait_until(lambda: looks(up)[-1]["state_type"] == "COMPLETED", "the end of the look", up.output)
        assert len(up.state("silent").attempts) == 1
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_block_that_is_not_there_is_named_before_anything_runs(tmp_path: Path) -> None:
    environment = {**up_environment(tmp_path, free_port()), "ALERT_BLOCK": "slack-webhook/nobody"}
    ended = subprocess.run(
        [str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=patience_seconds(), check=False
    )
    assert (ended.returncode, "alert block 'slack-webhook/nobody'" in ended.stderr) == (1, True)


def make_block(up: StartedUp, url: str) -> None:
    made = f"""
from prefect.blocks.notifications import CustomWebhookNotificationBlock
block = CustomWebhookNotificationBlock(
    name="mine", url={url!r}, json_data={{"title": "{{{{subject}}}}", "text": "{{{{body}}}}"}}
)
block.save("mine")
"""
    python(up, "-c", made)


def python(up: StartedUp, *words: str) -> str:
    """Run Python as a person would in the shell that `make up` describes."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=up.shell(),
        capture_output=True,
        text=True,
        timeout=patience_seconds(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
