"""Prefect from outside, as a person or a script meets it: its API and its command."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
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


def flow_run(api_url: str, flow_run_id: str | None) -> dict[str, Any]:
    """Return what the server knows of a flow run."""
    (found,) = ask(api_url, "flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})
    return dict(found)


def task_runs(api_url: str, flow_run_id: str) -> list[dict[str, Any]]:
    """Return the task runs of a flow run, in the order in which they began."""
    found = ask(api_url, "task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}, "limit": 200})
    return sorted(found, key=lambda item: str(item["start_time"]))


def edges(found: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the names of the task runs that each of these follows, by whatever input."""
    names = {item["id"]: item["name"] for item in found}
    inputs = ((item["name"], [one for given in item["task_inputs"].values() for one in given]) for item in found)
    return {name: sorted(names[one["id"]] for one in given) for name, given in inputs}


def cancel_waiting_flow_runs(api_url: str) -> None:
    """Cancel every flow run that a worker could still take."""
    waiting = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED", "PENDING", "PAUSED"]}}}}
    for flow_run in ask(api_url, "flow_runs/filter", waiting):
        ask(api_url, f"flow_runs/{flow_run['id']}/set_state", {"state": {"type": "CANCELLED"}, "force": True})


def log_of(api_url: str, flow_run_id: str | None) -> str:
    """Return the log of a flow run, its task runs' included."""
    rule = {"logs": {"flow_run_id": {"any_": [flow_run_id]}}, "limit": 200, "sort": "TIMESTAMP_ASC"}
    return "\n".join(line["message"] for line in ask(api_url, "logs/filter", rule))


def run_page(api_url: str, flow_run_id: str) -> str:
    """Return the page of the run that a flow run shows: its only artifact."""
    (page,) = ask(api_url, "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run_id]}}})
    return str(page["data"])


def environment_of(command: Command, api_url: str, **variables: str) -> dict[str, str]:
    """Return the environment of Prefect's programs for this run's store; a worker asks for work each second."""
    return {
        **os.environ,
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(command.folder / "prefect"),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "CAIRN_STORE": str(command.folder / "store"),
        "CAIRN_CACHE": str(command.folder / "cache"),
        **variables,
    }


def start_beside(command: Command, environment: Mapping[str, str], name: str, *words: str) -> "subprocess.Popen[bytes]":
    """Start a program of Prefect's that runs all the time, in a session of its own; NAME.txt has what it says."""
    with (command.folder / f"{name}.txt").open("ab") as output:
        return subprocess.Popen(
            [*SETTLED, *words],
            cwd=command.folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def prefect_command(command: Command, api_url: str, **variables: str) -> Prefect:
    """Return the `prefect` command, as `make up` uses it, for this run's store."""
    environment = environment_of(command, api_url, **variables)

    def run(*arguments: str, folder: Path = ROOT, **more: str) -> None:
        done = subprocess.run(
            [*SETTLED, "prefect", *arguments],
            cwd=folder,
            env={**environment, **more},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def launch(prefect: Prefect, command: Command, *words: str, **parameters: object) -> None:
    """Have a flow run of `train-gpt` made for the command's configuration; `words` are options of `deployment run`."""
    given = {"config": str(command.folder / "run.toml"), **parameters}
    prefect("deployment", "run", "train-gpt/train-gpt", "--params", json.dumps(given), *words)


def work(prefect: Prefect, **variables: str) -> None:
    """Have a worker run what waits for one, and leave."""
    prefect("worker", "start", "--pool", "cairn", "--run-once", **variables)
