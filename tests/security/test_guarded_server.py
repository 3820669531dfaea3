"""What stands in front of Prefect's server: which Host it lets through, who gets work, and the password of `make up`.

No server starts. Where the password lies: test_session_server.py, for the file of a temporary server.
"""

import os
import signal
from pathlib import Path

import pytest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.testclient import TestClient

from cairn.flows.orchestrator.prefect_server import ServerHome, drain_on_sigusr1, guard, up_environment

ROOT = Path(__file__).parents[2]


def status_for(host: str) -> int:
    return TestClient(guard(PlainTextResponse("pages")), base_url=f"http://{host}").get("/").status_code


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:4300", "127.0.0.1:4200"])
def test_the_machines_own_names_are_let_through(host: str) -> None:
    assert status_for(host) == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "192.168.0.1"])
def test_every_other_name_is_refused(host: str) -> None:
    assert status_for(host) == 400


def test_what_make_up_starts_is_the_guarded_server() -> None:
    text = (ROOT / "deployments" / "up.sh").read_text(encoding="utf-8")
    assert '-m cairn.flows.orchestrator.prefect_server --port "$PORT"' in text
    assert "prefect server start" not in text and '/prefect" server start' not in text


def asked_for_work(client: TestClient) -> object:
    return client.post("/api/work_pools/cairn/get_scheduled_flow_runs").json()


def test_after_sigusr1_workers_get_no_flow_run_and_everything_else_is_answered() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    client = TestClient(drain_on_sigusr1(JSONResponse(["a flow run"])))
    try:
        assert asked_for_work(client) == ["a flow run"]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert asked_for_work(client) == []
        assert client.get("/api/health").json() == ["a flow run"]
    finally:
        signal.signal(signal.SIGUSR1, before)


PASSWORD = "PREFECT_SERVER_API_AUTH_STRING"


def up(folder: Path, **environment: str) -> dict[str, str]:
    return up_environment(environment, ServerHome(folder), 4200)


def test_each_start_has_another_password(tmp_path: Path) -> None:
    first, second = up(tmp_path), up(tmp_path, **{PASSWORD: ""})
    assert first[PASSWORD] != second[PASSWORD] and len(first[PASSWORD]) > 30


def test_the_operators_is_taken_and_so_are_database_key_and_retention_and_no_other_setting(tmp_path: Path) -> None:
    taken = {
        PASSWORD: "admin:canary",
        "PREFECT_API_DATABASE_CONNECTION_URL": "postgresql+asyncpg://x",
        "PREFECT_SERVER_ENCRYPTION_KEY": "key",
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P9D",
    }
    foreign = {"PREFECT_SERVER_API_BASE_PATH": "/x", "HTTPS_PROXY": "x", "SSL_CERT_FILE": "x", "PREFECT_PROFILE": "x"}
    settled = up(tmp_path, **taken, **foreign)
    assert taken.items() <= settled.items() and not foreign.keys() & settled.keys()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("PREFECT_SERVER_CSRF_PROTECTION_ENABLED", "true"),
        ("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", "http://127.0.0.1:4200"),
    ],
)
def test_the_server_is_told_to_ask_for_tokens_and_to_let_no_other_origin_read(
    tmp_path: Path, setting: str, value: str
) -> None:
    assert up(tmp_path)[setting] == value
