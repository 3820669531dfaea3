"""The server of `cairn ui` and of `cairn watch --metrics-port`: tokens, and connections that ask for nothing."""

import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.errors import InvalidConfiguration
from cairn.ui import local_server
from cairn.ui.local_server import Access, read_access, serve_metrics
from tests.cairn.live_server import LiveServer, served
from tests.fabricated_run import fabricate
from tests.processes.waiting import wait_until

METRICS_TOKEN = "a-token-that-outlives-restarts"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    store = LocalStore(tmp_path_factory.mktemp("served"))
    fabricate(store, "bard").start()
    return store


@pytest.fixture(scope="module", params=["page", "watcher"])
def server(
    request: pytest.FixtureRequest, store: LocalStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Each of both servers."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "page":
        with served(store, folder, metrics_token=METRICS_TOKEN) as live:
            yield live
    else:
        (folder / "token").write_text(METRICS_TOKEN)
        address = urlsplit(serve_metrics(store, 0, str(folder / "token")))
        access = Access(token=address.query.removeprefix("token="), metrics_token=METRICS_TOKEN)
        yield LiveServer(port=address.port or 0, access=access)


WRONG = ("?token=", "?token=wrong", f"?token={METRICS_TOKEN}")
ASKED = ("/", "/metrics", "/runs/bard", "/assets/live.js", "/nothing", "/metrics/", *(f"/{wrong}" for wrong in WRONG))
ASKED += tuple(f"/metrics{wrong}" for wrong in WRONG)


@pytest.mark.parametrize(
    "given",
    [
        {"Authorization": ""},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {METRICS_TOKEN}"},
        {"Authorization": "", "Cookie": "cairn-{port}="},
        {"Authorization": "", "Cookie": f"cairn-{{port}}={METRICS_TOKEN}"},
        {"Authorization": "", "Cookie": "cairn-1={token}"},
        {"Authorization": "Bearer \u00fc"},
    ],
)
def test_without_the_token_nothing_is_answered(server: LiveServer, given: dict[str, str]) -> None:
    given = {name: value.format(port=server.port, token=server.access.token) for name, value in given.items()}
    for path in ASKED:
        answer = server.ask(path, **given)
        assert answer.status == 401 and "bard" not in answer.text and "set-cookie" not in answer.headers, path


@pytest.mark.parametrize("path", ["/", "/metrics"])
def test_the_token_of_the_address_is_kept_in_a_cookie_that_no_script_reads(
    store: LocalStore, tmp_path: Path, path: str
) -> None:
    with served(store, tmp_path) as live:
        first = live.ask(f"{path}?token={live.access.token}", Authorization="")
        cookie, *attributes = first.headers["set-cookie"].split("; ")
        assert {"HttpOnly", "SameSite=lax"} <= set(attributes)
        assert [first.status, live.ask("/models", Authorization="", Cookie=cookie).status] == [200, 200]


def test_the_token_of_the_file_reads_the_metrics_and_nothing_else(server: LiveServer) -> None:
    given = {"Authorization": f"Bearer {METRICS_TOKEN}"}
    assert [server.ask(path, **given).status for path in ("/metrics", "/", "/curves?run=bard")] == [200, 401, 401]


@pytest.mark.parametrize("content", [b"", b"\n", b"short", b"two words of enough characters", b"\xff" * 32])
def test_a_file_without_a_token_lets_nobody_in(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(InvalidConfiguration, match=r"--metrics-token-file .*token: "):
        read_access(str(tmp_path / "token"))


def test_the_token_of_a_file_is_its_text_without_the_end_of_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{METRICS_TOKEN}\n")
    assert read_access(str(tmp_path / "token")).metrics_token == METRICS_TOKEN
    assert read_access("").token != read_access("").token and read_access("").metrics_token == ""


def test_prometheus_is_answered_where_it_was_told(store: LocalStore) -> None:
    with urllib.request.urlopen(serve_metrics(store, 0)) as answer:
        text = answer.read().decode()
    assert text_string_to_metric_families(text) and 'cairn_run_retries_left{reason="lost",run="bard"} 20.0' in text


def test_a_port_that_is_taken_is_refused_by_name(store: LocalStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfiguration, match=f"--metrics-port {port}"):
            serve_metrics(store, port)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost:1", "", "127.0.0.1.evil.example:{port}"],
)
def test_another_name_for_this_machine_is_refused(server: LiveServer, host: str) -> None:
    for path in ("/", "/curves?run=bard", "/assets/live.js", "/metrics"):
        answer = server.ask(path, Host=host.format(port=server.port))
        assert answer.status == 400 and "bard" not in answer.text


def test_three_hundred_idle_connections_stop_neither_server_and_take_no_thread(server: LiveServer) -> None:
    server.ask("/metrics")
    threads = threading.active_count()
    with ExitStack() as idle:
        for _ in range(300):
            idle.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        answers = [server.ask("/metrics").status for _ in range(3)]
        assert answers == [200] * 3 and threading.active_count() <= threads + 1


def silent(connection: socket.socket) -> None:
    """Say nothing."""


def half(connection: socket.socket) -> None:
    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n")


def without_end(connection: socket.socket) -> None:
    connection.sendall(b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")


def kept(connection: socket.socket) -> None:
    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")


def unread(connection: socket.socket) -> None:
    connection.sendall(b"GET /assets/plotly.min.js HTTP/1.1\r\nHost: x\r\n\r\n" * 100)


@pytest.mark.parametrize("speak", [silent, half, without_end, kept, unread])
def test_a_connection_ends(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, speak: Callable[[socket.socket], None]
) -> None:
    monkeypatch.setattr(local_server, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(local_server, "MOST_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setblocking(False)
        speak(connection)
        wait_until(lambda: is_ended(connection), "the end of the connection")


def is_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1 << 20)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("size", [1 << 16, 1 << 20])
def test_a_header_without_an_end_is_refused(server: LiveServer, size: int) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(60)
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        try:
            connection.sendall(b"x" * size)
            assert b" 400 " in connection.recv(100)
        except (BrokenPipeError, ConnectionResetError):
            pass


def test_a_websocket_is_answered_as_any_request_and_nothing_is_printed(
    server: LiveServer, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec_WebSocket_Version": "13"}
    answers = [server.ask("/nothing", Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==", **wanted) for _ in range(2)]
    refused = server.ask("/nothing", Authorization="", **wanted)
    assert [*(answer.status for answer in answers), refused.status] == [404, 404, 401]
    assert capfd.readouterr() == ("", "")
