"""How long a rank works on a step by itself: what tells the slow one from those that wait for it."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class OwnTime:
    """The seconds of the newest step that is known: on a GPU, for which the host does not wait, an earlier one."""

    def __init__(self, device: torch.device) -> None:
        """Know nothing yet."""
        self._is_cuda = device.type == "cuda"
        self._launched = deque[tuple[float, torch.cuda.Event, torch.cuda.Event]]()
        self._reading = 0.0
        self.seconds = 0.0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the block as the wait for the step's batch."""
        began = time.perf_counter()
        yield
        self._reading = time.perf_counter() - began

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the block as the step's computation."""
        if not self._is_cuda:
            began = time.perf_counter()
            yield
            self.seconds = self._reading + time.perf_counter() - began
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._launched.append((self._reading, first, last))
        while self._launched and self._launched[0][2].query():
            reading, first, last = self._launched.popleft()
            self.seconds = reading + first.elapsed_time(last) / 1000
