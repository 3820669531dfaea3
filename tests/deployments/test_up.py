"""`make up`: everything on one machine, used from another shell, gone without a trace when it is told to."""

import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.deployments.started_up import SCRIPT, StartedUp, free_port, up_environment
from tests.processes.waiting import wait_until

slow = pytest.mark.slow
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("up")]


def refused(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**up_environment(folder, free_port()), **environment}
    return subprocess.run([str(SCRIPT)], env=variables, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedUp]:
    """Everything `make up` starts, once for all claims that need no password of the operator's."""
    started = StartedUp(tmp_path_factory.mktemp("up"))
    yield started
    started.stop(signal.SIGTERM)


def test_a_port_that_something_else_uses_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ended = refused(tmp_path, PORT=str(other.getsockname()[1]))
    assert ended.returncode == 1
    assert "in use by something that is no Prefect server" in ended.stderr and "PORT=" in ended.stderr


@pytest.mark.parametrize("port", ["eighty", "0", "70000"])
def test_a_port_that_cannot_be_is_refused(tmp_path: Path, port: str) -> None:
    ended = refused(tmp_path, PORT=port)
    assert (ended.returncode, f"PORT={port}" in ended.stderr) == (2, True)


def test_without_an_environment_it_says_how_to_make_one(tmp_path: Path) -> None:
    ended = refused(tmp_path, BIN=str(tmp_path))
    assert (ended.returncode, "make up" in ended.stderr) == (1, True)


@slow
def test_it_says_where_the_ui_is_and_there_it_is(up: StartedUp) -> None:
    assert f"the UI          {up.url}" in up.output()
    with urllib.request.urlopen(up.url, timeout=240) as page:
        assert b"<html" in page.read().lower()


@slow
def test_nothing_listens_beyond_the_loopback(up: StartedUp) -> None:
    listening = {
        connection.laddr.ip
        for process in up.processes()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


@slow
def test_telemetry_is_off(up: StartedUp) -> None:
    assert up.ask("api/admin/settings")["server"]["analytics_enabled"] is False


@slow
def test_all_deployments_are_there_and_the_schedules_are_on(up: StartedUp) -> None:
    found = up.ask("api/deployments/filter", {})
    assert {item["name"] for item in found} == {
        *("train-gpt", "train-set", "watch-runs", "after-crash", "sweep-checkpoints", "evaluate-promoted"),
        "tokenize-part",
    }
    scheduled = {item["name"] for item in found if any(schedule["active"] for schedule in item["schedules"])}
    assert scheduled == {"watch-runs", "sweep-checkpoints"}


@slow
def test_a_second_one_says_that_there_is_one_and_leaves_it_alone(up: StartedUp) -> None:
    ended = refused(up.folder, PORT=str(up.port))
    assert (ended.returncode, "already answers" in ended.stderr) == (1, True)
    assert up.ask("api/health") is True


@slow
def test_a_run_is_started_from_another_shell_and_ends_completed(up: StartedUp) -> None:
    ended = up.train("bard", "-p", 'overrides=["training.steps=10"]')
    assert ended.returncode == 0, ended.stdout + ended.stderr + up.output()
    (flow_run,) = [item for item in up.flow_runs("train-gpt") if item["parameters"]["run_id"] == "bard"]
    assert flow_run["state_name"] == "Completed"
    finished = up.state("bard").finished
    assert finished is not None and finished.step == 10


@slow
@pytest.mark.parametrize(
    "parameters",
    [
        ("run_id=two words",),
        ('overrides=["training.steps"]',),
        ('overrides=["model.n_heads=4"]',),
        ("config=7",),
        ("no_such_parameter=1",),
    ],
)
def test_a_bad_parameter_is_refused_before_there_is_a_flow_run(up: StartedUp, parameters: tuple[str, ...]) -> None:
    before = {item["id"] for item in up.flow_runs("train-gpt")}
    given = [word for parameter in parameters for word in ("-p", parameter)]
    ended = up.prefect("deployment", "run", "train-gpt/train-gpt", *given)
    assert ended.returncode != 0
    assert parameters[0].partition("=")[0] in ended.stdout + ended.stderr
    assert {item["id"] for item in up.flow_runs("train-gpt")} == before


@slow
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (("config=quickstar",), "no quickstar.toml in deployments"),
        (("config=", "run_id=nobody"), "run 'nobody' is not in this store"),
        (('overrides=["training.warmup_steps=-1"]',), "training.warmup_steps"),
    ],
)
def test_what_no_schema_knows_is_a_failure_with_its_reason_and_one_line(
    up: StartedUp, parameters: tuple[str, ...], words: str
) -> None:
    before = {item["id"] for item in up.flow_runs("train-gpt")}
    given = [word for parameter in parameters for word in ("-p", parameter)]
    ended = up.prefect("deployment", "run", "train-gpt/train-gpt", *given, "--watch", "--watch-interval", "1")
    made = [item for item in up.flow_runs("train-gpt") if item["id"] not in before]
    assert (ended.returncode, len(made)) == (1, 1), ended.stdout + ended.stderr
    newest = made[0]
    assert (newest["state_type"], newest["state_name"]) == ("FAILED", "Failed")
    assert newest["state"]["message"].startswith("invalid-configuration: ")
    assert words in newest["state"]["message"] and "Traceback" not in newest["state"]["message"]


@slow
def test_the_log_of_the_flow_run_tells_what_a_terminal_would(up: StartedUp) -> None:
    up.train("bard", "-p", 'overrides=["training.steps=10"]')
    rule = {"logs": {"level": {"ge_": 20}}, "limit": 200}

    def is_told() -> bool:
        return any("attempt 1 starts at step 0 of 10" in line["message"] for line in up.ask("api/logs/filter", rule))

    wait_until(is_told, "the attempt's beginning in the flow run's log")


@slow
def test_retention_is_applied_from_another_shell(up: StartedUp) -> None:
    ended = up.prefect("deployment", "run", "sweep-checkpoints/sweep-checkpoints", "-p", "dry_run=true", "--watch")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    newest = max(
        (item for item in up.flow_runs("sweep-checkpoints") if item["state_type"] == "COMPLETED"),
        key=lambda item: item["created"],
    )
    assert "would be freed" in newest["state"]["message"]


@slow
def test_a_watcher_that_dies_before_it_begins_does_not_hold_up_the_others_for_ever(up: StartedUp) -> None:
    (deployment,) = [item for item in up.ask("api/deployments/filter", {}) if item["name"] == "watch-runs"]
    dead = None
    while dead is None:  # the schedule's own may be at work just now
        pending = {"state": {"type": "PENDING", "message": "its worker is about to die"}}
        made = up.ask(f"api/deployments/{deployment['id']}/create_flow_run", {})
        up.ask(f"api/flow_runs/{made['id']}/set_state", pending)
        dead = made if up.ask(f"api/flow_runs/{made['id']}")["state_type"] == "PENDING" else None
        time.sleep(1)

    def has_completed() -> bool:
        time.sleep(1)
        others = [item for item in up.flow_runs("watch-runs") if item["id"] != dead["id"]]
        if all(item["end_time"] or item["auto_scheduled"] for item in others):  # the last one was not let in
            with suppress(urllib.error.HTTPError):  # 503: SQLite was locked, and is asked again
                up.ask(f"api/deployments/{deployment['id']}/create_flow_run", {})
        return any(item["state_type"] == "COMPLETED" and item["end_time"] > dead["created"] for item in others)

    wait_until(has_completed, "a watcher that was let in")


@slow
def test_the_same_server_takes_the_kubernetes_pool_and_its_deployments(up: StartedUp) -> None:
    folder = SCRIPT.parent / "kubernetes"
    pool = ("work-pool", "create", "cairn-gpu", "--type", "kubernetes", "--base-job-template")
    created = up.prefect(*pool, str(folder / "job-template.json"))
    assert created.returncode == 0, created.stdout + created.stderr
    other_names = up.folder / "prefect.yaml"
    text = (folder / "prefect.yaml").read_text(encoding="utf-8")
    other_names.write_text(text.replace("\n  - name: ", "\n  - name: gpu-"))
    ended = up.prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(other_names))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {item["name"]: item for item in up.ask("api/deployments/filter", {"limit": 50})}
    assert found["gpu-train-gpt"]["work_pool_name"] == "cairn-gpu"
    unknown = up.prefect("deployment", "run", "train-gpt/gpu-train-gpt", "--job-variable", "gpus=many")
    assert unknown.returncode != 0 and "gpus" in unknown.stdout + unknown.stderr
    for name in (
        "gpu-train-gpt",
        "gpu-watch-runs",
        "gpu-after-crash",
        "gpu-sweep-checkpoints",
        "gpu-evaluate-promoted",
        "gpu-tokenize-part",
    ):
        up.prefect("deployment", "delete", f"{name.removeprefix('gpu-')}/{name}")


@slow
@pytest.mark.parametrize(
    ("number", "password"), [(signal.SIGTERM, ""), (signal.SIGINT, "ann:a-password")], ids=["SIGTERM", "Ctrl-C"]
)
def test_told_to_stop_in_the_middle_of_a_run_it_lets_it_commit_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals, password: str
) -> None:
    given = {"PREFECT_SERVER_API_AUTH_STRING": password} if password else dict[str, str]()
    up = StartedUp(tmp_path, **given)
    try:
        if password:
            the_password_is_asked_for(up, password)
        endless = ("-p", f"config={up.config}", "-p", 'overrides=["training.steps=100000"]')
        asked = up.prefect("deployment", "run", "train-gpt/train-gpt", *endless)
        assert asked.returncode == 0, asked.stdout + asked.stderr
        wait_until(lambda: len(up.state("bard").checkpoints) > 1, "a commit")
    finally:
        code = up.stop(number)
    assert code == 0, up.output()
    assert up.processes() == [] and not up.key.exists()
    (attempt,) = up.state("bard").attempts
    newest = up.state("bard").newest_committed
    assert attempt.ended is not None and newest is not None
    assert (attempt.ended.reason, attempt.ended.last_step) == ("preempted", newest.committed.step)
    assert not password or password not in up.output()


def the_password_is_asked_for(up: StartedUp, password: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        up.ask("api/admin/settings", headers={})
    stranger = up.prefect("deployment", "ls", PREFECT_API_AUTH_STRING="")
    assert stranger.returncode != 0
    ended = up.train("short", "-p", 'overrides=["training.steps=5"]')
    assert ended.returncode == 0, ended.stdout + ended.stderr + up.output()
    assert up.state("short").finished is not None
