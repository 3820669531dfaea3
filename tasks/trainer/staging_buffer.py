"""The host memory that checkpoints are copied to: one block, allocated once and reused.

It is touched in advance, so that copies do not wait for page faults, and page-locked for a state on a GPU. Imports
neither msgspec nor pyarrow: machines without them measure it.
Source: PyTorch, "A guide on good usage of non_blocking and pin_memory"; NumPy asks for huge pages (madvise(2)).
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from cairn.model.training import sharded_tensors, train_state

_PAGE_BYTES = 4096
_BACKGROUND_NICENESS = 10
"""A tenth of the trainer's weight on a contended core, all of a free core."""


class StagingBuffer:
    """Host memory for one train state; its owner decides when it may be overwritten."""

    def __init__(self, device: torch.device) -> None:
        """Allocate nothing yet; `device` is where the state is."""
        self._device = device
        self._block = torch.empty(0, dtype=torch.uint8)
        self._copies: tuple[train_state.NamedTensor, ...] = ()
        self._preparing: threading.Thread | None = None

    @property
    def bytes(self) -> int:
        """The size of the block; 0 before the first use."""
        self._wait_prepared()
        return self._block.nbytes

    def prepare(self, tensors: Sequence[train_state.NamedTensor]) -> None:
        """Allocate the memory for these tensors in the background, while the first segment trains."""
        if self.bytes < (needed := sum(_rounded(named.tensor.nbytes) for named in tensors)):
            self._preparing = threading.Thread(target=self._run, args=(needed,), name="staging-buffer")
            self._preparing.start()

    def copy(
        self, tensors: Sequence[train_state.NamedTensor], writer: Callable[[str], int] = lambda _: 0, rank: int = 0
    ) -> tuple[train_state.NamedTensor, ...]:
        """Copy the tensors into the block, over its old content, and return the copies, which are views of it.

        Only tensors of which this `rank` is the `writer` are kept; sharded ones are gathered by it, so every rank must
        pass all of them.
        """
        kept = [named for named in tensors if writer(named.name) == rank]
        self._wait_prepared()
        if [_layout(named) for named in kept] != [_layout(copy) for copy in self._copies]:
            sizes = [named.tensor.nbytes for named in kept]
            self._reserve(sum(map(_rounded, sizes)))
            starts = accumulate(map(_rounded, sizes), initial=0)
            pieces = [self._block[start : start + size] for start, size in zip(starts, sizes, strict=False)]  # (bytes,)
            self._copies = tuple(
                replace(named, tensor=piece.view(named.tensor.dtype).view(named.tensor.shape))  # (bytes,) to its shape
                for named, piece in zip(kept, pieces, strict=True)
            )
        targets = {copy.name: copy.tensor for copy in self._copies}
        on_cuda = self._device.type == "cuda"
        with torch.no_grad():
            for named in tensors:
                values = sharded_tensors.gather_to(named.tensor, writer(named.name))
                if named.name in targets:
                    targets[named.name].copy_(values, non_blocking=on_cuda)
        if on_cuda:
            torch.cuda.synchronize(self._device)
        return self._copies

    def _wait_prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _run(self, size_bytes: int) -> None:
        lower_thread_priority()
        self._reserve(size_bytes)

    def _reserve(self, size_bytes: int) -> None:
        if self._block.nbytes >= size_bytes:
            return
        locked = self._device.type == "cuda"
        if locked and self._block.nbytes:
            torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr())
        self._block, self._copies = torch.empty(0, dtype=torch.uint8), ()  # free it before the larger one exists
        memory = np.empty(size_bytes + _PAGE_BYTES, dtype=np.uint8)
        memory[::_PAGE_BYTES] = 0
        block = torch.from_numpy(memory[-memory.ctypes.data % _PAGE_BYTES :][:size_bytes])
        if locked:
            # Not `pin_memory=True`: that allocator rounds up to a power of two, up to twice the state.
            # If the driver refuses, copies to ordinary pages are slower but as safe.
            torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)
        self._block = block


def lower_thread_priority() -> None:
    """Give the calling thread a lower priority than training; Linux only: setpriority(2), nptl(7)."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = max(_BACKGROUND_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _layout(named: train_state.NamedTensor) -> tuple[str, torch.dtype, torch.Size]:
    return named.name, named.tensor.dtype, named.tensor.shape


def _rounded(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES
