"""The check in front of Prefect's server, alone: which Host it lets through."""

from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from flows.orchestrator.guarded_server import guard

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
    assert "--factory flows.orchestrator.guarded_server:create_guarded_app" in text
    assert "prefect server start" not in text and '/prefect" server start' not in text
