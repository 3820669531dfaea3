"""The command that a machine passes before it joins: its exit code decides, and what it says is passed on."""

import socket

import pytest

from cairn.tasks.configuration.settings import MachinesConfig
from cairn.tasks.machine.placement import check_machine


@pytest.mark.parametrize("command", ["", "true"])
def test_a_machine_without_a_check_or_with_one_that_succeeds_joins(command: str) -> None:
    assert check_machine(MachinesConfig(check=command)) == ""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sh -c 'echo ECC errors; exit 3'", "left with 3: ECC errors"),
        ("/no/such/program", "No such file"),
        ("'", "No closing quotation"),
        ("sleep 60", "timed out"),
    ],
    ids=["fails", "is not there", "cannot be read", "takes too long"],
)
def test_a_check_that_does_not_succeed_says_why(command: str, said: str) -> None:
    why = check_machine(MachinesConfig(check=command, wait_seconds=0.5))
    assert why.startswith(f"machines.check of {socket.gethostname()} ") and said in why
