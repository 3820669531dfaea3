"""What listens while something of Cairn runs: nothing that another machine can reach."""

import ipaddress
import subprocess
from pathlib import Path

import psutil
import pytest

from tasks.trainer.rank_launcher import meeting_place
from tasks.trainer.trainer_group import RANK_STORE, TrainerGroup
from tests.crash.training_command import Command

pytestmark = pytest.mark.linux


def listening(process: "subprocess.Popen[bytes]") -> set[str]:
    """Return the addresses on which a process and its descendants wait for connections."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    connections = [connection for member in family for connection in member.net_connections(kind="inet")]
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def test_ranks_of_one_machine_meet_in_a_folder_that_only_this_user_may_enter() -> None:
    with meeting_place(TrainerGroup(processes=2)) as variables:
        folder = Path(variables[RANK_STORE]).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == "lo"
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_listens_on_the_loopback_alone(command_with_own_server: Command, processes: int) -> None:
    process = command_with_own_server.train_until(6, "--set", f"training.processes={processes}")
    addresses = listening(process)
    process.kill()
    process.wait()
    assert all(map(is_loopback, addresses)), addresses


@pytest.mark.slow
def test_a_run_of_one_process_with_a_named_server_listens_nowhere(command: Command) -> None:
    process = command.train_until(6)
    addresses = listening(process)
    process.kill()
    process.wait()
    assert not addresses
