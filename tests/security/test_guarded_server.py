"""What stands in front of Prefect's server, alone: which Host it lets through, and who gets work."""

import os
import signal
from pathlib import Path

import pytest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.testclient import TestClient

from cairn.flows.orchestrator.prefect_server import drain_on_sigusr1, guard

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
