"""Settings of the whole process, in a process of their own."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from cairn.model.errors import InvalidInput
from cairn.model.training.determinism import resolve_device
from tests.processes.fork_server import fork_server

pytestmark = pytest.mark.xdist_group("process-settings")  # its process is started once for all its tests


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the process prints."""
    words, pipe = [sys.executable, "-m", "tests.model.process_settings"], subprocess.PIPE
    process = fork_server().popen(words, stdout=pipe, stderr=pipe)
    printed, problem = process.communicate()
    assert process.returncode == 0, problem
    return dict(json.loads(printed))


def test_seeding_and_settings_hold_for_the_whole_process(found: dict[str, Any]) -> None:
    assert (found["settings"], found["draws again"], found["threads"]) == ([True, 1], True, 1)


@pytest.mark.linux  # the setting is glibc's
def test_a_block_taken_again_is_not_cleared_again(found: dict[str, Any]) -> None:
    assert found["faults"] < 100


def test_auto_is_a_device_that_exists() -> None:
    assert resolve_device("auto").type in {"cpu", "cuda"}


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is one here")
def test_an_apple_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInput, match="device='mps': this machine's torch has no Apple GPU; use 'auto' or 'cpu'"):
        resolve_device("mps")


def test_a_cuda_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInput, match=f"cuda:{torch.cuda.device_count()}"):
        resolve_device(f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize(("name", "index"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_cuda_device_has_its_number(monkeypatch: pytest.MonkeyPatch, name: str, index: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device(name).index == index
