"""Process-wide settings, in a process of their own."""

import subprocess
import sys

import pytest
import torch

from cairn.model.errors import InvalidInput
from cairn.model.training.determinism import resolve_device

SETTINGS = """
import random, numpy, torch
from cairn.model.training.determinism import make_deterministic
make_deterministic(seed=5, threads=1)
assert torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == 1
first = random.random(), numpy.random.random(), torch.rand(1).item()
make_deterministic(seed=5, threads=None)
assert (random.random(), numpy.random.random(), torch.rand(1).item()) == first
assert torch.get_num_threads() == 1
"""


def test_seeding_and_settings_hold_for_the_whole_process() -> None:
    done = subprocess.run([sys.executable, "-c", SETTINGS], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
