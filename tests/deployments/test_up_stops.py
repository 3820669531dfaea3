"""The order in which `make up` ends its processes, by the script's own functions, with stand-ins for what it started.

With the real ones: test_up.py and test_up_runs.py, which are slow.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployments.started_up import SCRIPT

pytestmark = pytest.mark.timeout(300)
PROCESS = """
import os, pathlib, signal, subprocess, sys
folder, name, *child = sys.argv[1:]
def say(word):
    with open(f"{folder}/said", "a") as said:
        said.write(word + "\\n")
def on_sigterm(*_):
    say(f"{name} told")
    while name == "run" and "server gives no work" not in pathlib.Path(folder, "said").read_text():
        pass  # as long as a commit may take
    if name != "hanging":
        say(f"{name} ended")
        os._exit(0)
signal.signal(signal.SIGTERM, on_sigterm)
signal.signal(signal.SIGUSR1, lambda *_: say(f"{name} gives no work"))
if child:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # it reaps its flow runs
    subprocess.Popen([sys.executable, "-c", os.environ["PROCESS"], folder, *child], start_new_session=True)
say(f"{name} ready")
while True:
    signal.pause()
"""
STOPPING = """
set -euo pipefail -o monitor
GRACE_SECONDS=$1 STOP_SECONDS=20 KEY=$2/key
{functions}
{python} -c "$PROCESS" "$2" server & server=$!
{python} -c "$PROCESS" "$2" worker "$3" & worker=$!
until [[ -e $2/said && $(grep -c ready "$2/said") = 3 ]]; do sleep 0.02; done
stop_all
"""


def stopped(folder: Path, run: str, *, grace_seconds: int) -> list[str]:
    """Return what server, worker and the worker's flow run said from the moment all were ready."""
    text = SCRIPT.read_text(encoding="utf-8")
    functions = re.findall(r"^stop_\w+\(\) \{$.*?^\}$", text, re.MULTILINE | re.DOTALL)
    script = STOPPING.format(functions="\n".join(functions), python=shlex.quote(sys.executable))
    command = ["bash", "-c", script, "up.sh", str(grace_seconds), str(folder), run]
    ended = subprocess.run(command, env={"PROCESS": PROCESS}, capture_output=True, text=True, timeout=240, check=True)
    assert "stopped" in ended.stdout
    return [line for line in (folder / "said").read_text().splitlines() if "ready" not in line]


def test_no_work_is_given_out_then_the_run_commits_then_the_worker_goes_then_the_server(tmp_path: Path) -> None:
    said = stopped(tmp_path, "run", grace_seconds=200)
    assert sorted(said[:2]) == ["run told", "server gives no work"]
    assert said[2:] == ["run ended", "worker told", "worker ended", "server told", "server ended"]


def test_a_run_that_does_not_leave_within_its_grace_is_told_once_and_killed(tmp_path: Path) -> None:
    said = stopped(tmp_path, "hanging", grace_seconds=1)
    assert said.count("hanging told") == 1 and said[-1] == "server ended"
