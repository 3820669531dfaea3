"""Which Prefect server a command uses, how long its temporary one lives, and its write lock: real processes."""

import asyncio
import os
import socket
import sqlite3
import stat
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import sqlalchemy

from cairn.flows.orchestrator import prefect_server, session_server
from cairn.flows.orchestrator.prefect_server import ServerHome, _take_write_locks_at_once
from cairn.flows.orchestrator.prefect_settings import authorization, prefect_home
from cairn.flows.orchestrator.session_server import SessionServer, settle_client
from tests.crash.prefect_server import copy_untouched_database
from tests.processes.fork_server import fork_server
from tests.processes.waiting import patience_seconds, wait_until

Choose = Callable[..., tuple[SessionServer, dict[str, str], list[str]]]


@pytest.fixture
def choose(tmp_path: Path) -> Iterator[Choose]:
    """Choose a server as a command does, with this work folder; returns it, the environment, and what was said."""
    servers = list[SessionServer]()

    def chosen(**variables: str) -> tuple[SessionServer, dict[str, str], list[str]]:
        environment, said = {**os.environ, "CAIRN_CACHE": str(tmp_path), **variables}, list[str]()
        servers.append(server := SessionServer(environment, say=said.append))
        server.choose()
        return server, environment, said

    yield chosen
    for server in servers:
        server.stop()


@pytest.fixture
def home(tmp_path: Path) -> ServerHome:
    return ServerHome(prefect_home({"CAIRN_CACHE": str(tmp_path)}))


@pytest.fixture
def nobody_listens() -> str:
    """The address of a server that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}/api"


def process_of(server: SessionServer) -> psutil.Process:
    server.start()
    assert server._own is not None and server._own.child is not None
    process = psutil.Process(server._own.child.pid)
    wait_until(lambda: len(process.cmdline()) > 2, "the server's program")
    return process


def status_of(api_url: str, path: str, **headers: str) -> int:
    parts = urlsplit(api_url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    connection.request("GET", path, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_named_server_that_is_gone_is_replaced_by_a_temporary_one(
    choose: Choose, nobody_listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_server, "_ABSENT_SECONDS", 0.0)
    server, environment, said = choose(PREFECT_API_URL=nobody_listens)
    assert server.is_ephemeral and server.api_url == environment["PREFECT_API_URL"] != nobody_listens
    assert said == [
        f"no Prefect server answers at {nobody_listens}: this run is not shown there",
        session_server.TEMPORARY,
    ]


def test_a_temporary_server_is_asked_with_no_setting_that_was_made_for_another(choose: Choose) -> None:
    foreign = {"PREFECT_API_KEY": "key", "PREFECT_API_REQUEST_TIMEOUT": "0.001", "PREFECT_CLIENT_CUSTOM_HEADERS": "{}"}
    assert not foreign.keys() & choose(**foreign)[1].keys()


def test_each_server_has_a_password_of_its_own_which_stands_in_no_argument(choose: Choose) -> None:
    passwords = set[str]()
    for _ in range(2):
        server, environment, _ = choose()
        process, password = process_of(server), environment["PREFECT_API_AUTH_STRING"]
        assert process.environ()["PREFECT_SERVER_API_AUTH_STRING"] == password
        assert not [word for word in process.cmdline() if password in word]
        passwords.add(password)
        server.stop()
    assert len(passwords) == 2


def test_its_process_has_none_of_the_users_settings_and_stands_in_cairns_own_folder(
    choose: Choose, home: ServerHome
) -> None:
    foreign = {
        "PREFECT_SERVER_API_BASE_PATH": "/x",
        "PREFECT_API_DATABASE_CONNECTION_URL": "x",
        "ALL_PROXY": "socks5://x",
    }
    process = process_of(choose(**foreign, SSL_CERT_FILE="/nowhere")[0])
    assert not {*foreign, "SSL_CERT_FILE"} & process.environ().keys()
    assert process.environ()["PREFECT_HOME"] == process.cwd() == str(home.folder) and "-P" in process.cmdline()


def test_the_password_lies_in_a_file_that_only_this_user_can_read_and_is_removed_at_the_end(
    choose: Choose, home: ServerHome
) -> None:
    home.folder.chmod(0o777)
    home.address_file.symlink_to(home.folder / "elsewhere")
    server, environment, _ = choose()
    assert environment["PREFECT_API_AUTH_STRING"] in home.address_file.read_text()
    assert not home.address_file.is_symlink() and not (home.folder / "elsewhere").exists()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (home.address_file, home.folder)]
    assert modes == [0o600, 0o700]
    process_of(server)
    server.stop()
    assert not home.address_file.exists()


def test_a_second_command_uses_the_server_of_the_first(choose: Choose) -> None:
    first, second = choose(), choose()
    assert (second[0].api_url, second[0].is_ephemeral) == (first[0].api_url, True)
    assert second[1]["PREFECT_API_AUTH_STRING"] == first[1]["PREFECT_API_AUTH_STRING"] and second[2] == []
    assert not second[0].is_lost


def test_a_server_ends_with_the_last_command_that_uses_it(choose: Choose, tmp_path: Path) -> None:
    copy_untouched_database(tmp_path)
    cache = str(tmp_path / "cache")
    first, second = choose(CAIRN_CACHE=cache)[0], choose(CAIRN_CACHE=cache)[0]
    with fork_server().forking():
        process = process_of(first)
    first.stop()
    assert second.wait_ready() and process.is_running()
    second.stop()
    psutil.wait_procs([process], timeout=patience_seconds())
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert first._own is not None and first._own.child is not None
    first._own.child.wait()


def test_a_server_that_dies_is_said_once_and_is_gone_for_the_command(choose: Choose) -> None:
    server, environment, said = choose()
    process_of(server).kill()
    assert server.wait_ready() is False and server.is_lost
    server.choose()
    assert server._own is not None
    whys = (f"it ended with code -9 ({server._own.log} has its words)", "it has ended")  # whoever sees it first
    ends = [f"the Prefect server is gone, {why}: this run goes on and its pages miss the rest" for why in whys]
    assert len(said) == 2 and said[1] in ends
    assert not environment.keys() & {"PREFECT_API_URL", "PREFECT_API_AUTH_STRING"}


def test_the_words_of_a_server_that_fails_are_in_a_file_and_not_between_those_of_the_run(
    choose: Choose, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made, broken = prefect_server._server_environment, {"PREFECT_API_DATABASE_CONNECTION_URL": "x"}
    monkeypatch.setattr(prefect_server, "_server_environment", lambda *given, **named: made(*given, **named) | broken)
    server = choose()[0]
    with fork_server().forking():
        server.start()
    assert server.wait_ready() is False and server._own is not None
    assert "Traceback" in server._own.log.read_text() and "Traceback" not in capfd.readouterr().err


def test_a_server_that_does_not_answer_in_time_is_said_once(choose: Choose) -> None:
    server, _, said = choose()
    process_of(server).suspend()
    assert server.wait_ready(timeout_seconds=0.2) is False
    assert said[1:] == ["the Prefect server is gone, no answer in 0 s: this run goes on and its pages miss the rest"]


def test_a_home_that_is_served_out_of_reach_costs_what_it_would_remember(
    choose: Choose, home: ServerHome, nobody_listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_server, "_BUSY_SECONDS", 0.0)
    serving = home.lock_serving()
    home.write_address(nobody_listens, "cairn:other", is_ephemeral=False)
    assert serving is not None and choose()[0].is_ephemeral
    assert home.read_address()["PREFECT_API_URL"] == nobody_listens
    os.close(serving)


def test_a_command_finds_a_running_make_up_by_itself(choose: Choose, home: ServerHome) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        serving = home.lock_serving()
        home.write_address(url, "cairn:up", is_ephemeral=False)
        environment = {"CAIRN_CACHE": str(home.folder.parents[1])}
        settle_client(environment, say=lambda words: None)
        assert (environment["PREFECT_API_URL"], environment["PREFECT_API_AUTH_STRING"]) == (url, "cairn:up")
        assert serving is not None and "127.0.0.1" in environment["NO_PROXY"]
        os.close(serving)


def test_a_temporary_server_ends_when_make_up_asks_for_its_home(choose: Choose, home: ServerHome) -> None:
    process = process_of(choose()[0])
    home.handover_file.touch()
    psutil.wait_procs([process], timeout=patience_seconds())
    serving = home.lock_serving()
    assert serving is not None and not home.address_file.exists()
    os.close(serving)
    home.handover_file.unlink()


@pytest.mark.slow  # quick witness: the test of the password
def test_another_user_of_the_machine_is_refused_and_the_run_itself_is_not(choose: Choose) -> None:
    server, environment, _ = choose()
    assert server.wait_ready()
    settings, headers = "/api/admin/settings", authorization(environment)
    assert (status_of(server.api_url, settings), status_of(server.api_url, settings, **headers)) == (401, 200)
    assert status_of(server.api_url, settings, Host="evil.example", **headers) == 400


async def read_then_write(configuration: Any, name: str) -> None:
    """Read, let the other one go on, and write, in one transaction as Prefect's services do."""
    engine = await configuration.engine()
    session = await configuration.session(engine)
    async with session, configuration.begin_transaction(session):
        await session.execute(sqlalchemy.text("SELECT count(*) FROM written"))
        await asyncio.sleep(0.05)
        await session.execute(sqlalchemy.text("INSERT INTO written VALUES (:name)"), {"name": name})


def test_two_transactions_that_read_and_then_write_both_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Takes a second, which every worker's collection would spend.
    from prefect.server.database.configurations import AioSqliteConfiguration

    monkeypatch.setattr(AioSqliteConfiguration, "begin_transaction", AioSqliteConfiguration.begin_transaction)
    _take_write_locks_at_once()
    path = tmp_path / "prefect.db"
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE written (name TEXT)")
    made.close()
    configuration = AioSqliteConfiguration(f"sqlite+aiosqlite:///{path}")

    async def both() -> None:
        await asyncio.gather(*(read_then_write(configuration, name) for name in ("a", "b")))
        await (await configuration.engine()).dispose()

    asyncio.run(both())
    with sqlite3.connect(path) as found:
        assert sorted(found.execute("SELECT name FROM written")) == [("a",), ("b",)]
    found.close()
