"""Where Prefect is asked: an address without secrets, a password of its own, and one line where either is wrong."""

import base64
import socket
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cairn.flows.orchestrator.prefect_settings import ask_server, authorization, server_address
from cairn.operations.checks import _check, _prefect
from cairn.tasks.errors import InvalidConfiguration
from tests.commands import Cairn
from tests.loopback import serving
from tests.processes.waiting import patience_seconds

PASSWORD = "admin:canary-of-auth"


class Guarded(BaseHTTPRequestHandler):
    """Answers who knows the password."""

    version = '"3.8.8"'

    def do_GET(self) -> None:
        expected = f"Basic {base64.b64encode(PASSWORD.encode()).decode()}"
        known = self.path == "/api/health" or self.headers.get("Authorization") == expected
        self.send_response(404 if "nowhere" in self.path else 200 if known else 401)
        self.end_headers()
        self.wfile.write(self.version.encode())


@pytest.fixture
def guarded() -> Iterator[str]:
    with serving(Guarded) as url:
        yield f"{url}/api"


@pytest.mark.parametrize(
    "url",
    [
        "http://user:canary@127.0.0.1:4200/api",
        "http://canary@127.0.0.1:4200/api",
        "http://:canary@127.0.0.1:4200/api",
        "http://127.0.0.1:canary/api",
        "http://[canary/api",
    ],
)
def test_an_address_with_a_secret_or_none_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        server_address({"PREFECT_API_URL": url})
    assert "canary" not in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("url", ["127.0.0.1:4200", "ftp://x/api", "http://", "nonsense"])
def test_what_is_no_address_is_refused_with_the_rule(url: str) -> None:
    with pytest.raises(InvalidConfiguration, match="rule: http"):
        server_address({"PREFECT_API_URL": url})


def asked(environment: Mapping[str, str]) -> str:
    """Return what the server says of itself, however busy the machine."""
    return ask_server(environment, timeout_seconds=patience_seconds())


def test_an_address_is_taken_as_it_is() -> None:
    assert (server_address({}), server_address({"PREFECT_API_URL": "http://h:1/api"})) == ("", "http://h:1/api")


def test_a_password_goes_before_a_key_as_in_prefects_client() -> None:
    assert authorization({}) == {}
    assert authorization({"PREFECT_API_AUTH_STRING": "a:b"}) == {"Authorization": "Basic YTpi"}
    assert authorization({"PREFECT_API_AUTH_STRING": "a:b", "PREFECT_API_KEY": "k"}) == {"Authorization": "Basic YTpi"}
    assert authorization({"PREFECT_API_KEY": "k"}) == {"Authorization": "Bearer k"}


def test_a_server_answers_refuses_or_is_gone(guarded: str) -> None:
    right = {"PREFECT_API_AUTH_STRING": PASSWORD}
    assert asked({"PREFECT_API_URL": guarded, **right}) == "3.8.8"
    with pytest.raises(InvalidConfiguration, match="refuses, 401: set PREFECT_API_AUTH_STRING"):
        asked({"PREFECT_API_URL": guarded})
    with pytest.raises(OSError):
        asked({"PREFECT_API_URL": "http://127.0.0.1:9/api", **right})


@pytest.mark.parametrize("version", ["<html>", "true", ""])
def test_something_else_that_answers_there_is_no_server(
    guarded: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guarded, "version", version)
    with pytest.raises(OSError, match="something else answers there"):
        asked({"PREFECT_API_URL": guarded, "PREFECT_API_AUTH_STRING": PASSWORD})
    with pytest.raises(OSError, match="404"):
        asked({"PREFECT_API_URL": f"{guarded}/nowhere", "PREFECT_API_AUTH_STRING": PASSWORD})


def test_what_speaks_another_protocol_is_no_server() -> None:
    def speak(listening: socket.socket) -> None:
        with listening.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=speak, args=(listening,))
        thread.start()
        with pytest.raises(OSError, match=r"something else|reset"):
            asked({"PREFECT_API_URL": f"http://127.0.0.1:{listening.getsockname()[1]}/api"})
        thread.join()


def test_a_server_of_this_machine_is_asked_without_the_proxy_of_the_environment(
    guarded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert asked({"PREFECT_API_URL": guarded, "PREFECT_API_AUTH_STRING": PASSWORD}) == "3.8.8"


@pytest.mark.parametrize("password", ["", "admin:wrong", PASSWORD])
def test_doctor_says_whether_the_password_is_right_and_never_what_it_is(
    guarded: str, password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", guarded)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", password)
    check = _check("prefect", _prefect)
    assert check.ok is (password == PASSWORD)
    assert ("answers: Prefect 3.8.8" if check.ok else "set PREFECT_API_AUTH_STRING") in check.detail
    assert not password or password not in check.detail


def test_doctor_never_repeats_an_address_with_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://user:canary@127.0.0.1:1/api")
    check = _check("prefect", _prefect)
    assert (check.ok, "canary" in check.detail, "PREFECT_API_AUTH_STRING" in check.detail) == (False, False, True)


def test_training_refuses_an_address_with_a_secret_in_one_line(cairn: Cairn, tmp_path: Path) -> None:
    (tmp_path / "none.toml").write_text('[data]\nsources = ["none.toml"]\ntokenizer = "bytes"\n')
    ended = cairn("train", "none.toml", PREFECT_API_URL="http://user:canary@127.0.0.1:1/api")
    assert ended.code == 2 and "canary" not in ended.out + ended.err and "Traceback" not in ended.err
