"""A hostile evaluator: it looks for credentials in its own environment and in that of every process it can see."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.tasks.configuration.configuration_source import resolve_evaluation
from cairn.tasks.configuration.settings import EvaluationConfig, EvaluatorConfig
from cairn.tasks.evaluator import confinement
from cairn.tasks.evaluator.evaluation_run import EvaluationSpec
from cairn.tasks.evaluator.evaluator import command_environment, run_command
from tests.tasks.evaluation_spec import evaluation_spec

pytestmark = pytest.mark.linux
NAMES = """
PGPASSWORD MYSQL_PWD SSHPASS GH_PAT OPENAI_APIKEY SLACK_WEBHOOK_URL SENTRY_DSN AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN
HF_TOKEN MLFLOW_TRACKING_TOKEN PREFECT_API_AUTH_STRING CUDA_GREETING HTTPS_PROXY ENTIRELY_UNSUSPICIOUS
"""
PLANTED = {name: f"canary-{number}" for number, name in enumerate(NAMES.split())}
SNOOP = """
import glob, json
processes, canaries = 0, 0
for path in glob.glob("/proc/[0-9]*/environ") + ["/proc/self/environ"]:
    processes += 1
    try:
        canaries += open(path, "rb").read().count(b"canary-")
    except OSError:
        pass
print(json.dumps({"processes": processes, "canaries": canaries}))
"""
REACH = """
import ctypes, json, os
process, reached = ctypes.CDLL(None), 0
for pid in (os.getppid(), {other}):
    try:
        os.close(os.open(f"/proc/{{pid}}/mem", os.O_RDONLY))
        reached += 1
    except OSError:
        pass
    reached += process.ptrace(0x4206, pid, None, None) == 0  # PTRACE_SEIZE, which stops nobody
print(json.dumps({{"reached": reached}}))
"""
ELSEWHERE = """
import runpy, sys
sys.platform = "elsewhere"
runpy.run_path({confinement!r}, run_name="__main__")
"""
UNPRIVILEGED = """
import ctypes, os, sys
for capability in (21, 38):  # CAP_SYS_ADMIN and CAP_PERFMON, which the root of a container does not have
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
EDIT = """
import os
os.mkdir("scratch/here"), open("scratch/made", "w").close(), os.rename("scratch/made", "scratch/here/moved")
print('{"user": %d, "files": %d}' % (os.getuid(), len(os.listdir("scratch/here"))))
"""


@pytest.fixture
def spec(tmp_path: Path) -> EvaluationSpec:
    return evaluation_spec(tmp_path)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Credentials in this process's environment, and in that of another one of the same user, whose number it is."""
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", "print(flush=True), input()"], **pipes) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert Path(f"/proc/{other.pid}/environ").read_bytes().count(b"canary-") == len(PLANTED)
        yield other.pid
        other.kill()


def suite_of(folder: Path, text: str) -> EvaluatorConfig:
    (folder / "score.py").write_text(text)
    section = {"evaluators": [{"name": "score", "command": ["python", "score.py"]}]}
    return resolve_evaluation(EvaluationConfig.model_validate(section), folder).evaluators[0]


def test_an_evaluator_reads_no_credential_of_any_process(spec: EvaluationSpec, tmp_path: Path, planted: int) -> None:
    found = run_command(suite_of(tmp_path, SNOOP), spec)
    if found.boundary == "none":
        pytest.skip("this system has neither Landlock nor user namespaces")
    assert found.metrics["canaries"] == 0 and found.metrics["processes"] > 2


def test_an_evaluator_reaches_into_the_memory_of_no_other_process(
    spec: EvaluationSpec, tmp_path: Path, planted: int
) -> None:
    found = run_command(suite_of(tmp_path, REACH.format(other=planted)), spec)
    if found.boundary == "none":
        pytest.skip("this system has neither Landlock nor user namespaces")
    assert found.metrics == {"reached": 0}


def test_where_no_boundary_can_be_entered_the_result_says_none(
    spec: EvaluationSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE.format(confinement=confinement.__file__))
    monkeypatch.setattr(confinement, "__file__", str(tmp_path / "elsewhere.py"))
    found = run_command(suite_of(tmp_path, "print('{\"a\": 1}')"), spec)
    assert (found.boundary, found.metrics) == ("none", {"a": 1})


def test_an_evaluator_works_with_files_as_the_user(spec: EvaluationSpec, tmp_path: Path) -> None:
    assert run_command(suite_of(tmp_path, EDIT), spec).metrics == {"user": float(os.getuid()), "files": 1.0}


@pytest.mark.parametrize("way", ["by_landlock", "by_user_namespace"])
def test_each_boundary_keeps_the_environments_of_other_processes_secret(way: str, tmp_path: Path, planted: int) -> None:
    enter = f"import runpy\nif not runpy.run_path({confinement.__file__!r})[{way!r}](): raise SystemExit(77)"
    command = [sys.executable, "-c", UNPRIVILEGED, "-c", f"{enter}\n{SNOOP}"]
    ended = subprocess.run(command, env={}, cwd=tmp_path, stdout=subprocess.PIPE, check=False)
    if ended.returncode == 77:
        pytest.skip("this system does not give it")
    assert json.loads(ended.stdout)["canaries"] == 0


def test_no_planted_variable_reaches_the_command_unless_the_operator_names_it(spec: EvaluationSpec) -> None:
    assert not PLANTED.keys() & command_environment({"PATH": "/bin", **PLANTED}, spec).keys()
    named = {"CAIRN_EVALUATOR_VARIABLES": "SSHPASS, GH_PAT", **PLANTED}
    assert PLANTED.keys() & command_environment(named, spec).keys() == {"SSHPASS", "GH_PAT"}
