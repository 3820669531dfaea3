"""`evaluate-promoted` as `make up` deploys it: run by a real worker, it trains nothing and adds a row."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.crash.training_command import Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
SUITE = """
batches = 2
batch_size = 8
sample_tokens = 4
[[evaluators]]
name = "count"
command = ["python", "-c", "import os, sys; print('{\\"files\\": %d}' % len(os.listdir(sys.argv[1])))"]
"""


def prefect(command: Command, api_url: str, *arguments: str) -> None:
    environment = {
        **os.environ,
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(command.folder / "prefect"),
        "CAIRN_ROOT": str(command.folder),
        "CAIRN_STORE": str(command.folder / "store"),
        "CAIRN_CACHE": str(command.folder / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def found(api_url: str, what: str, rule: dict[str, Any]) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        f"{api_url}/{what}/filter", data=json.dumps(rule).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        answered: list[dict[str, Any]] = json.load(answer)
    return answered


def test_the_champion_is_measured_under_a_file_by_a_worker_and_nothing_is_trained(
    command: Command, api_url: str
) -> None:
    command.train()
    suite = command.folder / "suite.toml"  # a relative path would start where `deploy` was run
    suite.write_text(SUITE)
    before = command.state()
    prefect(command, api_url, "work-pool", "create", "cairn", "--type", "process", "--overwrite")
    prefect(command, api_url, "--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    run = ("deployment", "run", "evaluate-promoted/evaluate-promoted", "-p", "reference=champion")
    prefect(command, api_url, *run, "-p", f"suite={suite}")
    prefect(command, api_url, "worker", "start", "--pool", "cairn", "--run-once")
    after = command.state()
    [flow_run] = found(api_url, "flow_runs", {"flows": {"name": {"any_": ["evaluate-promoted"]}}})
    assert flow_run["state_name"] == "Completed", flow_run["state"]["message"]
    new = after.evaluations[len(before.evaluations) :]
    assert [(item.step, item.suite) for item in new] == [(60, "held-out"), (60, "count")]
    assert (after.attempts, after.checkpoints) == (before.attempts, before.checkpoints)
    [artifact] = found(api_url, "artifacts", {"artifacts": {"flow_run_id": {"any_": [flow_run["id"]]}}})
    assert "| this | bard@60 | recorded | count" in artifact["data"]
