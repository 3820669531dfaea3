"""A person who is asked in Prefect whether a model may be promoted, and answers."""

import re
import subprocess
from typing import Any

from cairn.storage.logs.registry import Registry, RegistryState
from tests.crash.prefect_api import ask
from tests.crash.training_command import Command
from tests.processes.waiting import wait_for

ASKED = re.compile(r"resume flow run ([0-9a-f-]{36}) in")


def offering(alias: str, seconds: float = 300) -> tuple[str, ...]:
    """Return the options by which a run asks a person before it is promoted."""
    named = ("alias=" + alias, "require_approval=true", f"approval_timeout_seconds={seconds}")
    return tuple(word for setting in named for word in ("--set", f"promotion.{setting}"))


def registry(command: Command, alias: str) -> RegistryState:
    """Return what is known of an alias."""
    return Registry(command.store, alias).refresh()


def asked(command: Command, alias: str, **environment: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start the command; returns once it waits for a person, with the flow run's id."""
    process = command.start(*offering(alias), **environment)
    wait_for(lambda: ASKED.search(command.output()) is not None, process, "the question", command.output)
    return process, ASKED.findall(command.output())[-1]


def answer(api_url: str, flow_run_id: str, **run_input: Any) -> Any:
    """Answer as both UIs and `resume_flow_run(id, run_input=…)` do."""
    return ask(api_url, f"flow_runs/{flow_run_id}/resume", {"run_input": run_input})
