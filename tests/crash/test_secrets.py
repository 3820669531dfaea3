"""A real run with secrets planted wherever people keep them: none is in any byte that anything wrote.

Store, work folder, Prefect's home and database, logs, artifacts, reports, exports, what was printed: every file is
searched for each secret as it is, in base64, and as a URL quotes it. The same run is made under a umask that allows
everything, and nothing it wrote may be written by everybody.
"""

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.leaks import found_in, told_by
from tests.crash.training_command import Command, configuration
from tests.processes.waiting import patience_seconds

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("planted")]
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAcanary0000000001",
    "AWS_SECRET_ACCESS_KEY": "canary/aws+secret/02",
    "AWS_SESSION_TOKEN": "canary-session-token-03",
    "PREFECT_API_AUTH_STRING": "admin:canary-auth-04",
    "MLFLOW_TRACKING_USERNAME": "canary-mlflow-user-05",
    "MLFLOW_TRACKING_PASSWORD": "canary-mlflow-password-06",
    "HF_TOKEN": "hf_canary_token_07",
    "OPENAI_API_KEY": "sk-canary-08",
    "DATABASE_URL": "postgres" + "://somebody:canary-database-09@127.0.0.1/x",
    "MY_SERVICE_PASSWORD": "canary-service-10",
    "PGPASSWORD": "canary-postgres-12",
    "SSHPASS": "canary-ssh-13",
    "GH_PAT": "canary-github-14",
    "SLACK_WEBHOOK_URL": "https://hooks.example/canary-slack-15",
    "SENTRY_DSN": "https://canary-sentry-16@sentry.example/1",
    "CAIRN_NOTIFY__WEBHOOK": "http://127.0.0.1:9/canary-webhook-18",
    "ENTIRELY_UNSUSPICIOUS": "canary-nobody-knows-17",
}
PASSWORD_IN_A_URL = "canary-in-a-url-11"
# It tells what it knows and finds in other processes, fails once and then answers, so that its words are in the log,
# in a receipt and a task.
EVALUATOR = """
import glob, json, os, pathlib, sys
found = []
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        found += [item for item in open(path, "rb").read().split(bytes(1)) if b"canary" in item]
    except OSError:
        pass
print("I know", dict(os.environ), sys.argv, found, file=sys.stderr)
once = pathlib.Path({marker!r})
if not once.exists():
    once.touch()
    sys.exit(f"failed knowing {{found}} " + " ".join(f"{{name}}={{value}}" for name, value in os.environ.items()))
pid, processes, with_core = os.getppid(), 0, 0
while pid > 1 and b"cairn" in open(f"/proc/{{pid}}/cmdline", "rb").read():
    words = next(line for line in open(f"/proc/{{pid}}/limits") if line.startswith("Max core")).split()
    processes, with_core = processes + 1, with_core + (words[4:6] != ["0", "0"])
    pid = int(open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[1])
print(json.dumps({{"variables": len(os.environ), "processes": processes, "with_core": with_core}}))
"""


class Planted:
    """A finished run in a folder, everything it and the verbs after it wrote, and where its Prefect server lives."""

    def __init__(self, folder: Path, api_url: str) -> None:
        self.folder, self.api_url = folder, api_url
        self.command = Command(folder, api_url, environment=SECRETS, forked=False)  # forks do not show their variables
        (folder / "tells_all.py").write_text(EVALUATOR.format(marker=str(folder / "failed-once")))
        (folder / "run.toml").write_text(
            configuration(steps=10, every_commits=2).replace(
                "[lease]",
                f'command = ["{sys.executable}", "tells_all.py"]\n[exporters]\nmlflow = "http://127.0.0.1:9"\n[lease]',
            )
        )
        self.command.train()
        self._printed_by("report", "bard", "--html", "page.html")
        for verb in ("evaluations", "log", "explain", "report"):
            self._printed_by(verb, "bard", "--json")
        self._printed_by("export", "bard", "exported")
        self._printed_by("status", "bard", store=f"s3://somebody:{PASSWORD_IN_A_URL}@bucket/x", code=2)
        self._printed_by("train", "run.toml", store=f"s3://somebody:{PASSWORD_IN_A_URL}@bucket/x", code=2)
        exporter = f"exporters.mlflow=http://somebody:{PASSWORD_IN_A_URL}@127.0.0.1:9"
        self._printed_by("train", "run.toml", "--set", exporter, code=2)

    def _printed_by(self, *arguments: str, store: str = "", code: int = 0) -> None:
        process = self.command.start_verb(*arguments, *(("--store", store) if store else ()))
        assert process.wait(timeout=patience_seconds()) == code, f"{arguments}: {self.command.output()}"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> Iterator[Planted]:
    before = os.umask(0)
    try:
        yield Planted(tmp_path_factory.mktemp("planted"), api_url)
    finally:
        os.umask(before)


def test_no_byte_that_anything_wrote_holds_a_secret(planted: Planted) -> None:
    secrets = {**SECRETS, "a password in a URL": PASSWORD_IN_A_URL}
    files = [path for path in planted.folder.rglob("*") if path.is_file()]
    assert {"page.html", "README.md", "command-1.txt"} <= {path.name for path in files}
    leaks = {str(path.relative_to(planted.folder)): found_in(path.read_bytes(), secrets) for path in files}
    assert {path: names for path, names in leaks.items() if names} == {}


def test_the_orchestrator_was_told_no_secret(planted: Planted) -> None:
    told = told_by(planted.api_url)
    assert b"train-segment" in told and found_in(told, SECRETS) == []


def test_the_evaluator_spoke_from_behind_a_boundary(planted: Planted) -> None:
    state: Any = planted.command.state()
    assert any("failed knowing" in failed.detail for failed in state.failed_evaluations)
    measured = [item for item in state.evaluations if "variables" in item.metrics]
    assert {item.boundary for item in measured} in ({"landlock"}, {"user namespace"})


def test_no_process_above_the_evaluator_leaves_a_core_file(planted: Planted) -> None:
    state: Any = planted.command.state()
    measured = next(item.metrics for item in state.evaluations if "variables" in item.metrics)
    assert measured["with_core"] == 0 and measured["processes"] >= 2


def test_nothing_the_run_wrote_may_be_written_by_everybody(planted: Planted) -> None:
    given = {"run.toml", "tells_all.py", "prefect"}  # made by this test, and Prefect's own home
    written = [
        path
        for path in planted.folder.rglob("*")
        if not path.is_symlink()
        and path.relative_to(planted.folder).parts[0] not in given
        and not path.name.startswith("command-")
    ]
    assert len(written) > 20
    assert [str(path) for path in written if path.stat().st_mode & stat.S_IWOTH] == []
