"""Processes of ours that hold credentials: no program of the same user reads them, and no core file holds them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cairn.storage.stores.child_process import child_command, start_helper

pytestmark = pytest.mark.linux
ROOT = str(Path(__file__).parents[2])
OWN = "tests.security.own_memory"
COMMAND = "from cairn.cli import command; from tests.security.own_memory import show"
SERVER = "from cairn.flows.orchestrator import prefect_server; from tests.security.own_memory import show"
PROGRAMS = {
    "a child, such as trainer, rank and evaluator": child_command(OWN),
    "a command": ("-c", f"{COMMAND}; command.run_command = lambda words: show(); command.main([])"),
    "Prefect's server": ("-c", f"{SERVER}; prefect_server.main(); show()", "--address-file"),
}
UNPRIVILEGED = """
import ctypes, os, sys
for capability in (19, 21, 38):  # CAP_SYS_PTRACE, CAP_SYS_ADMIN and CAP_PERFMON
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
READING = """
import json, os, subprocess, sys
import psutil
from cairn.storage.stores.child_process import child_command, end_child, start_child
from cairn.tasks.machine import placement, process_memory
child = start_child(child_command("tests.security.own_memory"))
shown, process, read = json.loads(child.stdout.readline()), psutil.Process(child.pid), {}
read["peak"] = process_memory.peak_rss_bytes(child.pid)
read["limit"] = process_memory.memory_limit_bytes(child.pid)
read["room"] = process_memory.available_memory_bytes(child.pid)
read["start"] = placement._state_and_start_ticks(child.pid)
read["created"], read["resident"] = process.create_time(), process.memory_info().rss
read["parent"], read["running"] = process.ppid() == os.getpid(), process.is_running()
read["child of this one"] = process in psutil.Process().children()
try:
    read["secret"] = open(f"/proc/{child.pid}/environ", "rb").read().count(b"canary") == 0
except PermissionError:
    read["secret"] = True
end_child(child)
print(json.dumps(read))
"""


def read_by_others(words: Sequence[str]) -> Any:
    """What a program prints in which one of Cairn's own ends."""
    environment = {**os.environ, "PYTHONPATH": ROOT}
    command = words if words[0] == sys.executable else (sys.executable, *words)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, input="\n")
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_process_with_credentials_is_not_read_and_leaves_no_core_file(program: str) -> None:
    assert read_by_others(PROGRAMS[program]) == [0, 0, 0]


@pytest.mark.slow  # it imports Prefect; quick witness: the one above
def test_prefects_worker_its_deploys_and_flow_runs_are_not_read() -> None:
    assert read_by_others(("-P", "-m", "cairn.flows.orchestrator.prefect_settings", OWN)) == [0, 0, 0]


def test_a_helper_that_hides_nothing_has_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMETHING", "canary")
    helper = start_helper("input()")
    assert b"canary" not in Path(f"/proc/{helper.pid}/environ").read_bytes()
    helper.communicate(b"\n")


def test_without_privileges_its_parent_reads_what_it_needs_of_a_trainer_and_no_more() -> None:
    environment = {**os.environ, "PYTHONPATH": ROOT, "SOMETHING": "canary"}
    command = [sys.executable, "-c", UNPRIVILEGED, "-c", READING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    read = json.loads(done.stdout)
    assert {name for name, value in read.items() if not value} == set(), read
