"""A notice to a deployed flow run, from its claim on: its attempt has a receipt, preempted or cancelled, uncharged."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.crash.prefect_api import ROOT, Prefect, launch, work
from tests.crash.training_command import Command

pytestmark = [pytest.mark.slow, pytest.mark.linux, pytest.mark.timeout(900)]
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
