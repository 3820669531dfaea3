"""Process-wide determinism settings, and the random generators of a train state.

Promised: equal state, batches, device kind, micro-batch and thread count give an equal next state, bit for bit, on one
machine, in every precision, with dropout, accumulation and activation checkpointing (which changes no bit). Not
promised: equal bits across machines, library versions, thread counts, micro-batch sizes, or with `compile=True`.
"""

import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.errors import InvalidInput
from model.kernels.host_allocator import keep_freed_memory


def resolve_device(name: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda` or `cuda:<n>` into a device of this machine; a missing one raises InvalidInput."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(
            f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices; use 'auto' or 'cpu'"
        )
    return device


def make_deterministic(*, seed: int, threads: int | None) -> None:
    """Seed every global generator, fix the thread count and choose deterministic kernels, for the whole process.

    `threads` None fixes torch's own count. Call it before the first CUDA work: cuBLAS reads its setting once.
    """
    keep_freed_memory()  # changes no bit; a step on a CPU reuses the same blocks
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.set_num_threads(threads if threads is not None else torch.get_num_threads())
    choose_deterministic_kernels()


def choose_deterministic_kernels() -> None:
    """Choose deterministic kernels for the whole process; compiled ones are chosen by `COMPILE_OPTIONS`."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # As use_deterministic_algorithms(True), which also imports the compiler: a second that an evaluator does not need.
    torch.set_deterministic_debug_mode("error")
    # Filling new memory only helps to find reads of uninitialised memory, and costs a pass over every buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    # The memory-efficient attention kernel has no deterministic backward; flash has one.
    torch.backends.cuda.enable_mem_efficient_sdp(False)


@dataclass(slots=True)
class Generators:
    """States of the generators that dropout draws from; without CUDA, `cuda` is kept unchanged."""

    cpu: Tensor
    cuda: Tensor | None

    def reseed(self, seed: int, device: torch.device) -> None:
        """Set the states to the start of `seed`; the process's own generators stay unchanged."""
        with seeded_generators(seed, device) as fresh:
            pass
        self.cpu, self.cuda = fresh.cpu, fresh.cuda

    @contextlib.contextmanager
    def activate(self, device: torch.device) -> Iterator[None]:
        """Run the block with these states, then save them and restore the process's own; an exception saves nothing."""
        with _restore_process_generators(device):
            torch.set_rng_state(self.cpu)
            if device.type == "cuda" and self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, device)
            yield
            self.cpu = torch.get_rng_state()
            if device.type == "cuda":
                self.cuda = torch.cuda.get_rng_state(device)


@contextlib.contextmanager
def seeded_generators(seed: int, device: torch.device) -> Iterator[Generators]:
    """Seed the process's generators for the block; the yielded Generators hold the states at its end."""
    generators = Generators(cpu=torch.get_rng_state(), cuda=None)
    with _restore_process_generators(device):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield generators
        generators.cpu = torch.get_rng_state()
        if device.type == "cuda":
            generators.cuda = torch.cuda.get_rng_state(device)


def _restore_process_generators(device: torch.device) -> contextlib.AbstractContextManager[None]:
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
