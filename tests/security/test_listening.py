"""What listens while something of Cairn runs: on the loopback or in this user's folder, and HTTP with a password."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest

from cairn.tasks.trainer.trainer_group import RANK_STORE, TrainerGroup, meeting_place
from tests.crash.training_command import Command
from tests.processes.waiting import wait_for
from tests.security.listeners import family, is_password_asked, open_to_others, tcp_listeners, unix_listeners

pytestmark = pytest.mark.linux


@contextmanager
def trained(command: Command, *words: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A run that has come to its sixth step."""
    process = command.train_until(6, *words)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_ranks_of_one_machine_meet_in_a_folder_that_only_this_user_may_enter() -> None:
    with meeting_place(TrainerGroup(processes=2)) as place:
        variables = place.variables
        folder = Path(variables[RANK_STORE]).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == "lo"
    assert not folder.exists()


@pytest.mark.slow  # quick witnesses: the test above, and tests/flows/orchestrator/test_session_server.py
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_listens_where_nobody_else_can_use_it(command_with_own_server: Command, processes: int) -> None:
    with trained(command_with_own_server, "--set", f"training.processes={processes}") as process:
        assert tcp_listeners(family(process.pid)), "its Prefect server"
        assert open_to_others(process.pid) == []


@pytest.mark.slow
def test_a_run_of_one_process_with_a_named_server_listens_nowhere(command: Command) -> None:
    with trained(command) as process:
        assert not tcp_listeners(family(process.pid)) and not unix_listeners(family(process.pid))


@pytest.mark.slow
def test_a_watcher_and_what_it_starts_listen_where_nobody_else_can_use_it(command_with_own_server: Command) -> None:
    command = command_with_own_server
    with trained(command):
        pass
    watcher = command.start_verb("watch", "--every", "1", CAIRN_FAULTS="pause@9")
    try:
        wait_for(lambda: command.has_met("pause@9"), watcher, "a continued run", command.output)
        assert len(family(watcher.pid)) > 2 and open_to_others(watcher.pid) == []
    finally:
        for member in reversed(family(watcher.pid)):
            member.kill()
        watcher.wait()


class Obliging(BaseHTTPRequestHandler):
    """Answers everybody."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        return


def test_the_scan_sees_a_server_that_asks_nobody() -> None:
    with HTTPServer(("127.0.0.1", 0), Obliging) as server:
        Thread(target=server.handle_request, daemon=True).start()
        assert not is_password_asked(server.server_port)


def test_the_scan_sees_a_socket_of_all_addresses_and_a_unix_socket_that_others_reach(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with socket.create_server(("0.0.0.0", 0)), socket.socket(socket.AF_UNIX) as shared:
        shared.bind(str(tmp_path / "socket"))
        shared.listen()
        ours = [psutil.Process()]
        assert "0.0.0.0" in {ip for ip, _ in tcp_listeners(ours)}
        assert str(tmp_path / "socket") in unix_listeners(ours)
