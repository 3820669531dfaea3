"""What a stranger is told by `make up`: a web page, another name for the machine, somebody without the password."""

import http.client
import json
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect

from tests.deployments.started_up import StartedUp
from tests.processes.waiting import wait_until
from tests.security.listeners import is_password_asked, open_to_others

pytestmark = [pytest.mark.linux, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("up")]
# Quick witnesses: test_guarded_server.py and test_job_templates.py beside this file.
EVIL = "http://evil.example"


def answered(
    up: StartedUp, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    """Return what the server answers to this very request; its Host may be anything."""
    connection = http.client.HTTPConnection("127.0.0.1", up.port, timeout=240)
    try:
        sent = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        answer = connection.getresponse()
        answer.read()
        return answer
    finally:
        connection.close()


def train_gpt(up: StartedUp) -> str:
    """Return the id of the deployment."""
    found = up.ask("api/deployments/filter", {})
    return str(next(item["id"] for item in found if item["name"] == "train-gpt"))


@pytest.mark.parametrize("path", ["admin/settings", "flows/filter", "deployments/filter", "csrf-token?client=me"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_without_the_password_nothing_is_answered(up: StartedUp, method: str, path: str) -> None:
    assert answered(up, method, f"/api/{path}", {} if method == "POST" else None).status in (401, 403)


def test_all_that_the_api_describes_asks_for_the_password_but_its_health(up: StartedUp) -> None:
    described = up.ask("openapi.json", headers={})["paths"]
    asked = [(method.upper(), path) for path, methods in described.items() for method in methods]
    open_to_all = {path for method, path in asked if answered(up, method, f"/api{path}", {}).status not in (401, 403)}
    assert len(asked) > 100 and open_to_all == {"/health", "/ready"}


@pytest.mark.parametrize("path", ["/", "/api/health", "/api/admin/settings", "/ui-settings"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:4200", "127.0.0.1.evil.example", "localhost.evil", ""])
def test_another_name_for_the_machine_is_refused_even_with_the_password(up: StartedUp, host: str, path: str) -> None:
    assert answered(up, "GET", path, headers={**up.credentials(), "Host": host}).status == 400


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:4300", "localhost:8080"])
def test_the_machines_own_names_work_behind_any_port_as_a_tunnel_gives_them(up: StartedUp, host: str) -> None:
    assert answered(up, "GET", "/api/admin/settings", headers={**up.credentials(), "Host": host}).status == 200


def test_a_page_of_a_foreign_origin_starts_nothing_even_where_the_browser_adds_the_password(up: StartedUp) -> None:
    basic = {"Authorization": up.credentials()["Authorization"], "Origin": EVIL}
    path = f"/api/deployments/{train_gpt(up)}/create_flow_run"
    before = len(up.flow_runs("train-gpt"))
    for content_type in ("application/json", "text/plain"):
        answer = answered(up, "POST", path, {}, {**basic, "Content-Type": content_type})
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (403, None)
    assert len(up.flow_runs("train-gpt")) == before


def test_a_page_of_a_foreign_origin_may_read_nothing_and_is_told_so_before_it_asks(up: StartedUp) -> None:
    read = answered(up, "GET", "/api/csrf-token?client=tests", headers={**up.credentials(), "Origin": EVIL})
    assert read.headers["Access-Control-Allow-Origin"] is None
    asked = {"Origin": EVIL, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert answered(up, "OPTIONS", "/api/flow_runs/", headers=asked).headers["Access-Control-Allow-Origin"] is None


def test_events_are_streamed_to_nobody_without_the_password(up: StartedUp) -> None:
    address = f"ws://127.0.0.1:{up.port}/api/events/out"
    with pytest.raises(WebSocketException), connect(address, subprotocols=["prefect"], origin=EVIL) as socket:  # type: ignore[list-item, arg-type]
        socket.send(json.dumps({"type": "auth", "token": None}))
        socket.recv(timeout=240)
    with pytest.raises(InvalidStatus):
        connect(address, subprotocols=["prefect"], additional_headers={"Host": "evil.example"}).close()  # type: ignore[list-item]


def test_the_password_lies_in_a_file_that_only_this_user_can_read_and_is_said_once(up: StartedUp) -> None:
    assert stat.S_IMODE(up.key.stat().st_mode) == 0o600 and stat.S_IMODE(up.key.parent.stat().st_mode) == 0o700
    assert up.output().count(up.password) == 1 and len(up.password) > 30
    words = [word for process in up.processes() for word in process.cmdline()]
    assert not [word for word in words if up.password in word]


@pytest.mark.parametrize("words", ["prefect deployment ls", "cairn.cli.command train bard.toml --set training.steps=5"])
def test_a_second_shell_needs_one_line(up: StartedUp, words: str) -> None:
    names = {name: value for name, value in up.environment.items() if not name.startswith("PREFECT_")}
    line = f'. "{up.key}"\n"{sys.executable}" -m {words}'
    ended = subprocess.run(["bash", "-c", line], cwd=up.folder, env=names, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "temporary Prefect server" not in ended.stdout + ended.stderr and up.password not in ended.stdout


def test_another_start_has_another_password(up: StartedUp, tmp_path: Path) -> None:
    other = StartedUp(tmp_path)
    other.stop(signal.SIGTERM)
    assert up.password not in other.output() and f". {other.key}" in other.output()
    assert not other.key.exists(), "it stays only until the server stops"


def test_all_that_listens_is_for_this_user_alone(up: StartedUp) -> None:
    ended = up.prefect("deployment", "run", "train-gpt/train-gpt", "-p", f"config={up.config}", "-p", "run_id=scan")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    wait_until(lambda: bool(up.state("scan").attempts), "a run under way", up.output)
    assert is_password_asked(up.port)
    assert open_to_others(up.pid) == []


@pytest.mark.parametrize("variable", ["command", "env"])
def test_who_has_the_password_chooses_no_command_for_a_flow_run(up: StartedUp, variable: str) -> None:
    mark = up.folder / f"ran-{variable}"
    value = f"touch {mark}" if variable == "command" else {"PYTHONPATH": str(up.folder)}
    before = len(up.flow_runs("train-gpt"))
    path, asked = f"/api/deployments/{train_gpt(up)}/create_flow_run", {"job_variables": {variable: value}}
    assert 400 <= answered(up, "POST", path, asked, up.credentials()).status < 500
    assert len(up.flow_runs("train-gpt")) == before and not mark.exists()


def test_an_operator_who_names_the_open_template_lets_flow_runs_choose_their_command(tmp_path: Path) -> None:
    up = StartedUp(tmp_path, JOB_TEMPLATE="deployments/job-template-open.json")
    try:
        mark = tmp_path / "ran"
        chosen = ("--job-variable", f"command=touch {mark}")
        asked = up.prefect("deployment", "run", "train-gpt/train-gpt", *chosen)
        assert asked.returncode == 0, asked.stdout + asked.stderr
        wait_until(mark.exists, "the command", up.output)
    finally:
        up.stop(signal.SIGTERM)
