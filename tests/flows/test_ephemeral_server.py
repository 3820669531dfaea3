"""The temporary Prefect server under its supervision: real servers, killed."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from cairn.flows.orchestrator import prefect_server
from cairn.flows.orchestrator.prefect_server import EphemeralServer, authorization
from tests.processes.waiting import wait_until


@contextmanager
def started(folder: Path, said: list[str]) -> Iterator[EphemeralServer]:
    server = EphemeralServer({**os.environ, "PREFECT_HOME": str(folder)}, say=said.append)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def kill(server: EphemeralServer) -> None:
    """Kill the server that lives, and wait until the next one does or it is given up."""
    child = server._child
    child.kill()
    wait_until(lambda: server._child is not child or server.is_lost, "the next server")


def status_of(server: EphemeralServer, path: str = "/api/health", **headers: str) -> int:
    """Return the status that the address answers with."""
    parts = urlsplit(server.api_url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    connection.request("GET", path, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_each_server_has_a_password_of_its_own_which_stands_in_no_argument(tmp_path: Path) -> None:
    passwords = set[str]()
    for _ in range(2):
        with started(tmp_path, []) as server:
            variables = dict[str, str]()
            server.name_in(variables)
            child = psutil.Process(server._child.pid)
            wait_until(lambda child=child: len(child.cmdline()) > 2, "the server's program")  # type: ignore[misc]
            assert child.environ()["PREFECT_SERVER_API_AUTH_STRING"] == variables["PREFECT_API_AUTH_STRING"]
            assert not [word for word in child.cmdline() if variables["PREFECT_API_AUTH_STRING"] in word]
            passwords.add(variables["PREFECT_API_AUTH_STRING"])
            server.forget_in(variables)
            assert variables == {}
    assert len(passwords) == 2


@pytest.mark.slow  # quick witness: the test above
def test_another_user_of_the_machine_is_refused_and_the_run_itself_is_not(tmp_path: Path) -> None:
    with started(tmp_path, []) as server:
        variables = dict[str, str]()
        server.name_in(variables)
        server.wait_ready()
        settings = "/api/admin/settings"
        assert (status_of(server, settings), status_of(server, settings, **authorization(variables))) == (401, 200)
        assert status_of(server, settings, Host="evil.example", **authorization(variables)) == 400


def test_a_server_that_dies_is_started_again_on_the_same_socket(tmp_path: Path) -> None:
    with started(tmp_path, []) as server:
        words = psutil.Process(server._child.pid).cmdline()
        kill(server)
        assert psutil.Process(server._child.pid).cmdline() == words
        assert server._child.poll() is None


@pytest.mark.slow  # quick witness: the test above, and tests/crash/test_ephemeral_server.py
def test_a_request_waits_for_the_server_that_is_started_again(tmp_path: Path) -> None:
    said, statuses = list[str](), list[int]()
    with started(tmp_path, said) as server:
        asking = threading.Thread(target=lambda: statuses.append(status_of(server)))
        kill(server)
        asking.start()
        server.wait_ready()
        asking.join()
    assert (statuses, said) == ([200], [])


def test_a_server_that_cannot_live_is_given_up_with_one_line_and_answers_at_once_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefect_server, "_BACKOFF_SECONDS", (0.0, 0.0))
    said = list[str]()
    with started(tmp_path, said) as server:
        for _ in range(3):
            kill(server)
        wait_until(lambda: bool(said), "the line")
        assert said == ["the temporary Prefect server died 3 times: its pages miss the rest of this run"]
        assert status_of(server) == 410


def test_a_server_that_lived_long_before_it_died_has_all_its_restarts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefect_server, "_BACKOFF_SECONDS", (0.0,))
    monkeypatch.setattr(prefect_server, "_LONG_LIFE_SECONDS", 0.0)
    said = list[str]()
    with started(tmp_path, said) as server:
        for _ in range(4):
            kill(server)
        assert not server.is_lost


def test_one_that_is_given_up_before_it_answers_is_an_error_that_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefect_server, "_BACKOFF_SECONDS", ())
    with started(tmp_path, []) as server:
        kill(server)
        with pytest.raises(RuntimeError, match=r"did not start: it ended with code -9; set PREFECT_API_URL"):
            server.wait_ready()


def test_one_that_is_stopped_is_not_started_again(tmp_path: Path) -> None:
    with started(tmp_path, []) as server:
        child = server._child
        server.stop()
        assert server._child is child and child.returncode is not None
