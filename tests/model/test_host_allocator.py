"""The allocator's setting, in a process of its own."""

import subprocess
import sys

import pytest

MEASURED = """
import resource, sys
import torch
from cairn.model.training.determinism import keep_freed_memory
kept = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(25):
        torch.ones(2**22)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults())
"""


@pytest.mark.linux  # the setting is glibc's
def test_a_block_taken_again_is_not_cleared_again() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURED], check=True, capture_output=True, text=True, timeout=240)
    kept, faults = done.stdout.split()
    assert kept == "False" or int(faults) < 100
