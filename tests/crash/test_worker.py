"""Deployments that a real worker runs: a continued run, an evaluation, a person's approval, notices to a flow run."""

import json
from pathlib import Path
from typing import Any

import pytest

from cairn.storage.logs.registry import Registry
from tests.crash.approval import answer, offering
from tests.crash.prefect_api import ROOT, Prefect, flow_runs, launch, log_of, run_page, work
from tests.crash.training_command import Command
from tests.crash.victims import kill_flow
from tests.processes.waiting import patience_seconds, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("deployed")
def test_the_schedule_of_watch_runs_fires(api_url: str) -> None:
    wait_until(
        lambda: any(item["state_type"] == "SCHEDULED" for item in flow_runs(api_url, "watch-runs")), "a scheduled run"
    )


@pytest.mark.usefixtures("deployed")
def test_two_watchers_create_one_flow_run_and_a_worker_ends_the_run_with_the_undisturbed_bits(
    command: Command, api_url: str, prefect: Prefect, undisturbed_sha256: str, tmp_path: Path
) -> None:
    kill_flow(command.train_until(12))
    before = {item["id"] for item in flow_runs(api_url, "train-gpt")}
    look = ("watch", "--once", "--json", "--deployment", "train-gpt/train-gpt")
    watchers = [command.start_verb(*look, CAIRN_CACHE=str(tmp_path / machine)) for machine in "ab"]
    assert [watcher.wait(timeout=patience_seconds()) for watcher in watchers] == [0, 0]
    created = [item for item in flow_runs(api_url, "train-gpt") if item["id"] not in before]
    assert [item["name"] for item in created] == ["bard, attempt 2"]
    work(prefect)
    assert command.state_sha256() == undisturbed_sha256
    assert len(command.state().attempts) == 2


SUITE = """
batches = 2
batch_size = 8
sample_tokens = 4
[[evaluators]]
name = "count"
command = ["python", "-c", "import os, sys; print('{\\"files\\": %d}' % len(os.listdir(sys.argv[1])))"]
"""


@pytest.mark.usefixtures("deployed")
def test_the_champion_is_measured_under_a_file_by_a_worker_and_nothing_is_trained(
    command: Command, api_url: str, prefect: Prefect
) -> None:
    command.train()
    suite = command.folder / "suite.toml"  # a relative path would start where `deploy` was run
    suite.write_text(SUITE)
    before = command.state()
    run = ("deployment", "run", "evaluate-promoted/evaluate-promoted", "-p", "reference=champion")
    prefect(*run, "-p", f"suite={suite}")
    work(prefect)
    after = command.state()
    [flow_run] = flow_runs(api_url, "evaluate-promoted")
    assert flow_run["state_name"] == "Completed", flow_run["state"]["message"]
    new = after.evaluations[len(before.evaluations) :]
    assert [(item.step, item.suite) for item in new] == [(60, "held-out"), (60, "count")]
    assert after.attempts == before.attempts
    # What was superseded may be deleted meanwhile: the worker also takes a scheduled sweep that is due.
    assert [r.committed for r in after.checkpoints] == [r.committed for r in before.checkpoints]
    assert "| this | bard@60 | recorded | count" in run_page(api_url, flow_run["id"])


@pytest.mark.usefixtures("deployed")
def test_a_deployed_run_leaves_its_machine_while_a_person_thinks(
    command: Command, api_url: str, prefect: Prefect
) -> None:
    overrides = [word for word in offering("champion") if word != "--set"]
    launch(prefect, command, run_id="bard", store=str(command.folder / "store"), overrides=overrides)
    work(prefect)
    here = command.store.url  # as its start has written it; other tests' flow runs are on the same server
    (asking,) = [item for item in flow_runs(api_url, "train-gpt") if item["parameters"].get("store") == here]
    assert asking["state_name"] == "Suspended"
    assert Registry(command.store, "champion").refresh().history == ()
    question = "may champion point at bard@60? It waits for approval until 20"
    assert question in (log := log_of(api_url, asking["id"])) and "Traceback" not in log
    assert f"/runs/flow-run/{asking['id']}, or `cairn promote bard@60`" in log
    page = run_page(api_url, asking["id"])
    assert "**May `champion` point at `bard@60`? It waits for approval until 20" in page
    assert f"](../../runs/flow-run/{asking['id']})" in page
    answer(api_url, asking["id"], approve=True, by="ann", why="it rhymes")
    work(prefect)
    champion = command.champion()
    assert champion is not None and (champion.by, champion.step) == ("ann", 60)
    assert len(command.state().attempts) == 1
    assert "waits for approval" not in run_page(api_url, asking["id"])
    assert log_of(api_url, asking["id"]).count(question) == 1


REASONS = {"SIGTERM": "preempted", "SIGINT": "cancelled", "SIGHUP": "preempted", "SIGUSR1": "preempted"}
PLACES = (
    "run_start.py:_claim",
    "attempt_entries.py:claim_attempt",
    "attempt_trainer.py:running",
    "run_decisions.py:finish_run",
)


@pytest.fixture
def counted(command: Command, prefect: Prefect, deployed: None, request: pytest.FixtureRequest) -> Path:
    """The file in which the process of the next flow run leaves where it got its signal."""
    name, place = request.param
    template: dict[str, Any] = json.loads((ROOT / "deployments" / "job-template.json").read_text(encoding="utf-8"))
    file = command.folder / "counted"
    template["job_configuration"]["command"] = (
        f"python -m tests.crash.noticed_command {name} {place} {file} prefect.engine"
    )
    changed = command.folder / "job-template.json"
    changed.write_text(json.dumps(template), encoding="utf-8")
    prefect("work-pool", "update", "cairn", "--base-job-template", str(changed))
    return file


@pytest.mark.parametrize(
    ("counted", "name", "place"),
    [pytest.param((name, place), name, place, id=f"{name}-{place}") for name in REASONS for place in PLACES],
    indirect=["counted"],
)
def test_a_notice_to_a_deployed_flow_run_is_booked_with_a_receipt(
    command: Command, prefect: Prefect, counted: Path, name: str, place: str
) -> None:
    launch(prefect, command, run_id="bard", overrides=["training.steps=6", "preemption.signal=SIGUSR1"])
    work(prefect, PYTHONPATH=str(ROOT))
    assert place in counted.read_text(), "the notice was given"
    ends = [record.ended for record in command.state().attempts]
    assert None not in ends
    allowed = {"completed", REASONS[name]}
    assert [(end.reason, end.decision.charged) for end in ends if end and end.reason not in allowed] == []
    assert all(end.decision.charged is None for end in ends if end)
