"""Prefect from outside, as a person or a script meets it: its API and its command."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tests.crash.training_command import Command
from tests.processes.waiting import patience_seconds

ROOT = Path(__file__).parents[2]
SETTLED = (sys.executable, "-P", "-m", "cairn.flows.orchestrator.prefect_settings")
"""How `make up` runs commands of Prefect's."""
JOB_TEMPLATE = "deployments/job-template.json"
Prefect = Callable[..., None]


def ask(api_url: str, path: str, body: dict[str, Any]) -> Any:
    """Return what the API answers, as its clients do after asking again where the server's database was locked."""
    request = urllib.request.Request(
        f"{api_url}/{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    for pause in (0.5, 1.0, 2.0, 4.0, 8.0):
        try:
            with urllib.request.urlopen(request, timeout=patience_seconds()) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            time.sleep(pause)
    raise AssertionError("the server's database stayed locked")


def flow_runs(api_url: str, flow: str) -> list[dict[str, Any]]:
    """Return the flow runs of a flow."""
    found: list[dict[str, Any]] = ask(api_url, "flow_runs/filter", {"flows": {"name": {"any_": [flow]}}})
    return found


def cancel_waiting_flow_runs(api_url: str) -> None:
    """Cancel every flow run that a worker could still take."""
    waiting = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED", "PENDING", "PAUSED"]}}}}
    for flow_run in ask(api_url, "flow_runs/filter", waiting):
        ask(api_url, f"flow_runs/{flow_run['id']}/set_state", {"state": {"type": "CANCELLED"}, "force": True})


def log_of(api_url: str, flow_run_id: str) -> str:
    """Return the log of a flow run, its task runs' included."""
    rule = {"logs": {"flow_run_id": {"any_": [flow_run_id]}}, "limit": 200, "sort": "TIMESTAMP_ASC"}
    return "\n".join(line["message"] for line in ask(api_url, "logs/filter", rule))


def run_page(api_url: str, flow_run_id: str) -> str:
    """Return the page of the run that a flow run shows: its only artifact."""
    (page,) = ask(api_url, "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run_id]}}})
    return str(page["data"])


def prefect_command(command: Command, api_url: str) -> Prefect:
    """Return the `prefect` command, as `make up` uses it, for this run's store."""
    environment = {
        **os.environ,
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(command.folder / "prefect"),
        "CAIRN_STORE": str(command.folder / "store"),
        "CAIRN_CACHE": str(command.folder / "cache"),
    }

    def run(*arguments: str, folder: Path = ROOT) -> None:
        done = subprocess.run(
            [*SETTLED, "prefect", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run
