"""A hostile evaluator: it looks for credentials in its own environment and in that of every process it can see."""

import json
import os
import re
import signal
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
CRASH = """
import ctypes, fcntl, json, os, resource, signal, socket, struct
system, other = ctypes.CDLL(None, use_errno=True), {other}
def limits(): resource.prlimit(other, resource.RLIMIT_CORE, resource.prlimit(0, resource.RLIMIT_CORE))
def limits_by_number(): return system.syscall(302 if os.uname().machine == "x86_64" else 261, other, 4, b"0" * 16, None)
def send(): os.kill(other, {signal})
def send_to_all(): os.kill(-os.getpgid(other), {signal})
def send_to_thread(): return system.tgkill(other, other, {signal})
def send_by_descriptor(): signal.pidfd_send_signal(os.pidfd_open(other), {signal})
def send_queued(): return system.sigqueue(other, {signal}, None)
def send_on_input():
    ours, theirs = socket.socketpair()
    fcntl.fcntl(ours, 10, {signal})  # F_SETSIG
    fcntl.fcntl(ours, fcntl.F_SETOWN, other)
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC)
    theirs.send(b"now")
try:
    returned = {way}()
except PermissionError:
    returned = -1
print(json.dumps({{"reached": int(returned in (None, 0))}}))
"""
OWN = """
import json, os, resource, signal, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
resource.prlimit(0, resource.RLIMIT_NOFILE, (63, 64))
waiting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
waiting.send_signal(signal.SIGTERM)
ended = waiting.wait()
aborted = subprocess.run([sys.executable, "-X", "faulthandler", "-c", "import os; os.abort()"], stderr=-3).returncode
print(json.dumps({"ended": ended, "aborted": int(aborted < 0)}))
"""
WAYS = [
    "limits",
    "limits_by_number",
    "send",
    "send_to_all",
    "send_to_thread",
    "send_by_descriptor",
    "send_queued",
    "send_on_input",
]
EDIT = """
import os
os.mkdir("scratch/here"), open("scratch/made", "w").close(), os.rename("scratch/made", "scratch/here/moved")
print('{"user": %d, "files": %d}' % (os.getuid(), len(os.listdir("scratch/here"))))
"""


@pytest.fixture
def spec(tmp_path: Path) -> EvaluationSpec:
    return evaluation_spec(tmp_path)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[int]:
    """Credentials in this process's environment, and in that of another one of the same user, whose number it is."""
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", "print(flush=True), input()"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, cwd=tmp_path, start_new_session=True) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert Path(f"/proc/{other.pid}/environ").read_bytes().count(b"canary-") == len(PLANTED)
        yield other.pid
        assert other.poll() is None
        other.kill()


def suite_of(folder: Path, text: str) -> EvaluatorConfig:
    (folder / "score.py").write_text(text)
    section = {"evaluators": [{"name": "score", "command": ["python", "score.py"]}]}
    return resolve_evaluation(EvaluationConfig.model_validate(section), folder).evaluators[0]


def require_boundary(boundary: str, *, whole: bool = False) -> None:
    """Skip the test where the system gives none, or not the whole of it."""
    if boundary == "none" or (whole and "partial" in boundary):
        pytest.skip(f"this system gives this boundary: {boundary}")


def test_an_evaluator_reads_no_credential_of_any_process(spec: EvaluationSpec, tmp_path: Path, planted: int) -> None:
    found = run_command(suite_of(tmp_path, SNOOP), spec)
    require_boundary(found.boundary)
    assert found.metrics["canaries"] == 0 and found.metrics["processes"] > 2


def test_an_evaluator_reaches_into_the_memory_of_no_other_process(
    spec: EvaluationSpec, tmp_path: Path, planted: int
) -> None:
    found = run_command(suite_of(tmp_path, REACH.format(other=planted)), spec)
    require_boundary(found.boundary)
    assert found.metrics == {"reached": 0}


@pytest.mark.parametrize(("way", "signal"), [*((way, signal.SIGSEGV) for way in WAYS), ("send", signal.SIGQUIT)])
def test_an_evaluator_makes_no_other_process_leave_its_memory_in_a_file(
    spec: EvaluationSpec, tmp_path: Path, planted: int, way: str, signal: int
) -> None:
    found = run_command(suite_of(tmp_path, CRASH.format(other=planted, way=way, signal=int(signal))), spec)
    require_boundary(found.boundary, whole=True)
    assert found.metrics == {"reached": 0}


def test_an_evaluator_limits_and_ends_its_own_processes(spec: EvaluationSpec, tmp_path: Path) -> None:
    assert run_command(suite_of(tmp_path, OWN), spec).metrics == {"ended": -15, "aborted": 1}


@pytest.mark.parametrize(
    ("broken", "boundary"), [("by_landlock", "user namespace"), ("refuse_signals", r"\w+( namespace)?, partial")]
)
def test_a_boundary_that_does_not_hold_is_not_reported(
    spec: EvaluationSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, boundary: str
) -> None:
    text = Path(confinement.__file__).read_text()
    claims = f"\n\ndef {broken}() -> bool:\n    return True\n\n\ndef main()"
    (tmp_path / "claims.py").write_text(text.replace("\n\ndef main()", claims))
    monkeypatch.setattr(confinement, "__file__", str(tmp_path / "claims.py"))
    found = run_command(suite_of(tmp_path, "print('{\"a\": 1}')"), spec)
    require_boundary(found.boundary)
    assert re.fullmatch(boundary, found.boundary)


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
