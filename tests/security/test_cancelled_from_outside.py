"""Somebody cancels the flow run of a command on its own server: a stranger cannot, and the run's end is the log's."""

import json
import urllib.error
import urllib.request
from typing import Any

import psutil
import pytest

from cairn.flows.orchestrator.prefect_settings import authorization
from tests.crash.training_command import Command
from tests.crash.victims import descendants_with
from tests.processes.waiting import patience_seconds

pytestmark = [pytest.mark.linux, pytest.mark.slow]  # quick witness: tests/flows/orchestrator/test_session_server.py
CANCELLING = {"state": {"type": "CANCELLING", "name": "Cancelling"}}


def posted(url: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
    sent = {"Content-Type": "application/json", **headers}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), sent), timeout=120) as answer:
        return json.load(answer)


def test_a_stranger_cannot_cancel_a_run_and_one_cancelled_all_the_same_ends_as_its_log_says(
    command_with_own_server: Command,
) -> None:
    command = command_with_own_server
    process = command.train_until(6)
    (server,) = descendants_with(process, "cairn.flows.orchestrator.prefect_server")
    password = psutil.Process(server.pid).environ().get("PREFECT_SERVER_API_AUTH_STRING", "")
    (port,) = {item.laddr.port for item in server.net_connections(kind="inet") if item.status == psutil.CONN_LISTEN}
    flow_run = command.state().attempts[-1].flow_run_id
    url = f"http://127.0.0.1:{port}/api/flow_runs/{flow_run}/set_state"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        posted(url, CANCELLING, {})
    posted(url, CANCELLING, authorization({"PREFECT_API_AUTH_STRING": password}))
    command.let_go("pause@6")
    assert process.wait(timeout=patience_seconds()) == 0, command.output()
    assert "promoted: champion" in command.output()
    ended = command.state().attempts[-1].ended
    assert ended is not None and ended.reason == "completed"
