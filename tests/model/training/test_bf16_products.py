"""OpenMP that gives fewer threads than a product was cut for leaves parts of it garbage: kept away, else refused."""

import os
import subprocess
import sys

import pytest

from cairn.model.errors import InvalidInput
from cairn.model.training import determinism
from cairn.storage.stores.child_process import DEVNULL, THREAD_LIMITS, child_environment, start_child

MULTIPLY = "from cairn.model.training.determinism import make_deterministic; make_deterministic(seed=0, threads=2)"
COMMAND = [sys.executable, "-P", "-c", MULTIPLY]
LIMITS = {"OMP_THREAD_LIMIT": "1", "OMP_DYNAMIC": "TRUE", "OMP_MAX_ACTIVE_LEVELS": "0"}


BARE = """
import torch
torch.set_num_threads(2)
left, right = torch.randn(2, 256, 256).bfloat16()
print(not float((left @ right - left.float() @ right.float()).abs().max()) <= 2.0, flush=True)  # nor NaN
"""
"""Prints whether products of this process are wrong, which depends on the processor."""


@pytest.mark.slow  # quick witness: test_products_that_are_wrong_are_refused_before_the_first_computation
@pytest.mark.parametrize("name", ["OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS"])
def test_products_with_fewer_threads_than_were_asked_for_are_refused_in_words(name: str) -> None:
    command = [sys.executable, "-P", "-c", BARE + MULTIPLY]
    child = subprocess.run(command, env={**os.environ, name: LIMITS[name]}, capture_output=True, text=True, check=False)
    assert child.stdout == f"{child.returncode != 0}\n", child.stderr
    if child.returncode == 0:
        pytest.skip("this processor's products are right with fewer threads too")
    assert "bf16 products of this process are wrong by " in child.stderr and f"{name}={LIMITS[name]}" in child.stderr


def test_products_that_are_wrong_are_refused_before_the_first_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "_LARGEST_PRODUCT_ERROR", -1.0)  # as on a processor where they are
    with pytest.raises(InvalidInput, match="bf16 products of this process are wrong by "):
        determinism.make_deterministic(seed=0, threads=1)


@pytest.mark.slow  # quick witness: test_no_limit_of_threads_reaches_a_child
def test_a_child_gets_the_threads_that_it_asks_for_whatever_limits_them_outside() -> None:
    child = start_child(COMMAND, stdout=DEVNULL, environment={**os.environ, **LIMITS})
    _, said = child.communicate()
    assert (child.returncode, said) == (0, b"")


@pytest.mark.parametrize("name", THREAD_LIMITS)
def test_no_limit_of_threads_reaches_a_child(name: str) -> None:
    assert name not in child_environment({name: "1"})
