"""What must be set so that the same run gives the same bits, and the generators a train state owns.

Owns process-wide determinism settings and the swap of generators. Refuses to know the loop.

Promised, bit for bit: the same state, batches, device kind, micro-batch and thread count give the same next state,
run to run on one machine, in fp32, bf16 and fp16, with dropout, accumulation and activation checkpointing (which
changes no bit).
Not promised: equal bits across machines, library versions, thread counts, micro-batch sizes, or with `compile=True`.
On CUDA this rests on what PyTorch's source says of its deterministic mode (flash attention's backward takes an order of
its own, cuDNN's attention is not chosen, the compiler times no kernels) and is shown by `make bench-gpu` where it runs.
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
    """Turn `auto`, `cpu`, `cuda` or `cuda:<n>` into a device that exists here, else InvalidInput."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(
            f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices; use 'auto' or 'cpu'"
        )
    return device


def make_deterministic(*, seed: int, threads: int | None) -> None:
    """Seed every global generator, pin the thread count and choose deterministic kernels, for the whole process.

    `threads` None keeps torch's own count but pins it, so that no library changes it under way. Call it before the
    first CUDA work: cuBLAS reads its workspace setting once.
    """
    keep_freed_memory()  # changes no bit: a step on a CPU takes the same blocks again and again
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.set_num_threads(threads if threads is not None else torch.get_num_threads())
    choose_deterministic_kernels()


def choose_deterministic_kernels() -> None:
    """Choose them for the whole process; for the first time it imports for a second, which needs no seed yet."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory only helps to find reads of uninitialised memory; it costs a pass over every buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    # The memory-efficient attention kernel has no deterministic backward; flash has one.
    torch.backends.cuda.enable_mem_efficient_sdp(False)


@dataclass(slots=True)
class Generators:
    """States of the generators that dropout draws from; `cuda` is carried untouched where there is no CUDA."""

    cpu: Tensor
    cuda: Tensor | None

    def go_back_to(self, earlier: "Generators") -> None:
        """Take the states `earlier` holds."""
        self.cpu, self.cuda = earlier.cpu, earlier.cuda

    def restart(self, seed: int, device: torch.device) -> None:
        """Draw from the beginning of `seed` from now on; the process's own generators are left as they were."""
        with seeded_generators(seed, device) as fresh:
            pass
        self.cpu, self.cuda = fresh.cpu, fresh.cuda

    @contextlib.contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        """Let the block draw from these states, then keep where they got to and give the process its own back.

        After an exception the states are as before the block.
        """
        with _process_generators_restored(device):
            torch.set_rng_state(self.cpu)
            if device.type == "cuda" and self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, device)
            yield
            self.cpu = torch.get_rng_state()
            if device.type == "cuda":
                self.cuda = torch.cuda.get_rng_state(device)


@contextlib.contextmanager
def seeded_generators(seed: int, device: torch.device) -> Iterator[Generators]:
    """Seed the process's generators for the block; the yielded Generators hold the state the block left."""
    generators = Generators(cpu=torch.get_rng_state(), cuda=None)
    with _process_generators_restored(device):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield generators
        generators.cpu = torch.get_rng_state()
        if device.type == "cuda":
            generators.cuda = torch.cuda.get_rng_state(device)


@contextlib.contextmanager
def _process_generators_restored(device: torch.device) -> Iterator[None]:
    outer_cpu = torch.get_rng_state()
    outer_cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(outer_cpu)
        if outer_cuda is not None:
            torch.cuda.set_rng_state(outer_cuda, device)
