"""The live page of `cairn ui`: who is answered, what a browser may do with an answer, and words that stay words."""

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.storage.stores.local_store import LocalStore
from cairn.ui.local_server import find_user
from tests.cairn.hostile_store import FEW_VALUES, MORE_VALUES, HostileStore, change, places
from tests.cairn.live_server import LiveServer, served
from tests.processes.waiting import patience_seconds
from tests.security.listeners import tcp_listeners

if TYPE_CHECKING:
    from playwright.sync_api import Page

PATHS = ("/", "/runs/bard", "/runs/bard/attempts/1", "/compare?run=bard", "/models", "/curves?run=bard", "/runs/gone")
METRICS_TOKEN = "of-a-monitor-of-another-user"
TAGS = "<script>window.owned=1</script><img src=x onerror=window.owned=1><style>*{display:none}</style>\"'>`{{7*7}}"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> HostileStore:
    return HostileStore(tmp_path_factory.mktemp("hostile"))


@pytest.fixture
def live(hostile: HostileStore, tmp_path: Path) -> Iterator[LiveServer]:
    with served(LocalStore(hostile.root), tmp_path, metrics_token=METRICS_TOKEN) as page:
        yield page


@pytest.fixture
def tagged(live: LiveServer, hostile: HostileStore) -> Iterator[LiveServer]:
    """The live page of a store whose every free word ends in tags."""
    hostile.change_all_words(TAGS)
    yield live
    hostile.restore()


def test_its_own_names_are_answered(live: LiveServer) -> None:
    assert [live.ask("/", Host=f"{name}:{live.port}").status for name in ("127.0.0.1", "localhost")] == [200, 200]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reading_is_answered(live: LiveServer, method: str) -> None:
    assert live.ask("/", method=method).status == 405


def test_every_answer_forbids_scripts_and_styles_that_are_not_files_of_cairn(live: LiveServer) -> None:
    for path in (*PATHS, "/assets/live.js", "/nothing"):
        answer = live.ask(path)
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
    assert live.ask("/", Host="evil.example").headers["content-security-policy"]


def test_no_page_has_a_script_or_style_of_its_own(tagged: LiveServer) -> None:
    for path in set(PATHS) - {"/curves?run=bard"}:  # which is no page, and says so
        text = tagged.ask(path).text
        assert re.findall(r"<script(?! src=\"/assets/)", text) == [], path
        assert not re.search(r"<style|<[^>]*\s(?:style|on\w+)=", text), path


@pytest.mark.linux
def test_it_listens_on_the_loopback_alone(live: LiveServer) -> None:
    import psutil

    assert {ip for ip, port in tcp_listeners([psutil.Process()]) if port == live.port} == {"127.0.0.1"}


MAPPED = "0000000000000000FFFF00000100007F"


@pytest.mark.linux
@pytest.mark.parametrize(
    ("local", "remote", "state", "user"),
    [
        ("0100007F:9C40", "0100007F:210C", "01", 7),
        ("0100007F:9C40", "0100007F:210C", "05", 7),
        ("0100007F:9C41", "0100007F:210C", "01", None),
        (f"{MAPPED}:9C40", f"{MAPPED}:210C", "01", 7),
        ("0100007F:9C40", "0100007F:210C", "06", None),  # its last packets are waited for: the row says root
        ("0100007F:9C40", "0100007F:210C", "0A", None),
        ("0200000A:9C40", "0100007F:210C", "01", None),
        ("0100007F:9C40", "0200000A:210C", "01", None),
        ("0100007F:210C", "0100007F:9C40", "01", None),  # the server's own end
    ],
)
def test_all_four_values_and_the_state_of_a_connection_are_compared(
    tmp_path: Path, local: str, remote: str, state: str, user: int | None
) -> None:
    table = tmp_path / "tcp"
    table.write_text(f"heading\n   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000 7 0 1 1 0\n")
    assert find_user(table, client_port=0x9C40, server_port=0x210C) == user
    assert find_user(tmp_path / "gone", client_port=0x9C40, server_port=0x210C) is None


@pytest.mark.linux
def test_whoever_the_system_does_not_name_is_not_answered(
    live: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").write_text("heading\n")
    monkeypatch.setattr("cairn.ui.local_server._CONNECTIONS", (tmp_path / "empty",))
    assert [live.ask(path).status for path in ("/", "/curves?run=bard", "/metrics")] == [401, 401, 401]
    assert live.ask("/metrics", Authorization=f"Bearer {METRICS_TOKEN}").status == 200


@pytest.mark.linux
def test_an_address_that_the_kernel_writes_differently_is_answered_to_its_user(live: LiveServer) -> None:
    assert ask_mapped(live) == 200


def ask_mapped(live: LiveServer) -> int:
    """Ask over ::ffff:127.0.0.1, whose connection stands in another table."""
    import http.client
    import socket

    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    connection.sock = socket.create_connection(("::ffff:127.0.0.1", live.port), timeout=60)
    connection.request("GET", "/", headers={"Host": f"127.0.0.1:{live.port}", **live.credentials})
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.linux
@pytest.mark.skipif(os.getuid() != 0, reason="only root can ask as another user")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # of Python 3.12: the child asks
def test_another_user_of_the_machine_is_not_answered(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root can ask as somebody else, so the server is that of another user, whom a third one asks."""
    import multiprocessing

    def ask() -> list[int]:
        return [*(live.ask(path).status for path in ("/", "/metrics")), ask_mapped(live)]

    def refuses(user: int, expected: list[int]) -> None:
        os.setresuid(user, user, user)
        assert ask() == expected and live.ask("/metrics", Authorization=f"Bearer {METRICS_TOKEN}").status == 200

    ask()  # imports what only root may read
    monkeypatch.setattr(os, "getuid", lambda: 1001)
    for user, expected in ((1001, [200, 200, 200]), (1002, [401, 401, 401])):
        child = multiprocessing.get_context("fork").Process(target=refuses, args=(user, expected))
        child.start()
        child.join(patience_seconds())
        assert child.exitcode == 0, user


def test_a_log_with_any_value_anywhere_is_shown_or_refused(live: LiveServer, hostile: HostileStore) -> None:
    @settings(max_examples=8)
    @given(st.data())
    def tried(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(["runs/bard", "runs/bard", "models/champion"]))
        entries = copy.deepcopy(hostile.originals[name])
        entry = data.draw(st.sampled_from(entries))
        place = data.draw(st.sampled_from([place for place in places(entry) if place[0] not in ("prev", "seq")]))
        change(entry, place, data.draw(st.sampled_from([*FEW_VALUES, *MORE_VALUES, ...])))
        hostile.write(name, entries)
        for path in PATHS:
            answer = live.ask(path)
            assert answer.status in (200, 404, 503), (path, answer.text)
            assert path.startswith("/curves") or "<script>alert" not in answer.text

    try:
        tried()
    finally:
        hostile.restore()


@pytest.mark.slow  # quick witness: test_no_page_has_a_script_or_style_of_its_own
def test_no_word_of_a_store_runs_in_a_browser(tagged: LiveServer, page: "Page") -> None:
    for path in PATHS:
        page.goto(tagged.at(path))
        page.wait_for_load_state("networkidle")
        assert page.evaluate("window.owned") is None, path
        assert page.locator("main img, main style, main script").count() == 0, path


@pytest.mark.slow  # quick witness: test_local_server.py::test_another_name_for_this_machine_is_refused
def test_a_page_whose_name_was_bound_to_this_machine_reads_nothing(live: LiveServer, page: "Page") -> None:
    answer = page.goto(f"http://evil.example:{live.port}/")
    assert answer is not None and answer.status == 400
    assert page.evaluate("async () => (await fetch('/curves?run=bard').catch(() => ({status: 0}))).status") in (0, 400)
