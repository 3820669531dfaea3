"""A person who is asked in Prefect whether a model may be promoted, and answers."""

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

from storage.logs.registry import Registry, RegistryState
from tests.crash.training_command import Command
from tests.processes.waiting import patience_seconds, wait_for

ASKED = re.compile(r"resume flow run ([0-9a-f-]{36}) in")


def offering(alias: str, seconds: float = 300) -> tuple[str, ...]:
    """Return the options by which a run asks a person before it is promoted."""
    named = ("alias=" + alias, "require_approval=true", f"approval_timeout_seconds={seconds}")
    return tuple(word for setting in named for word in ("--set", f"promotion.{setting}"))


def registry(command: Command, alias: str) -> RegistryState:
    """Return what is known of an alias."""
    return Registry(command.store, alias).refresh()


def asked(command: Command, alias: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start the command; returns once it waits for a person, with the flow run's id."""
    process = command.start(*offering(alias))
    wait_for(lambda: ASKED.search(command.output()) is not None, process, "the question", command.output)
    return process, ASKED.findall(command.output())[-1]


def answer(api_url: str, flow_run_id: str, **run_input: Any) -> dict[str, Any]:
    """Answer as both UIs and `resume_flow_run(id, run_input=…)` do, again where the server's database was locked."""
    body = json.dumps({"run_input": run_input}).encode()
    request = urllib.request.Request(
        f"{api_url}/flow_runs/{flow_run_id}/resume", data=body, headers={"Content-Type": "application/json"}
    )
    for pause in (0.5, 1.0, 2.0, 4.0, 8.0):
        try:
            with urllib.request.urlopen(request, timeout=patience_seconds()) as response:
                answered: dict[str, Any] = json.load(response)
                return answered
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            time.sleep(pause)
    raise AssertionError("the server's database stayed locked")
