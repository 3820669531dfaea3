"""Prefetches the next steps' batches in a thread: there is no position to save, and errors come from `batch`."""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cairn.model.data import sample_order, token_windows

DRAWS_PER_CALL = 4096
"""Draws computed in one call of the order: for a few, a call costs more than gathering their tokens."""
STEPS_AHEAD = 2
"""One batch being gathered and one ready; more helps only where some reads are far slower than a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One step's samples: `windows` of all processes (B,), and `tokens`, the int64 ids of one's own rows (b, T+1).

    `targets` are those of all processes that the loss counts.
    """

    windows: tuple[int, ...]
    tokens: torch.Tensor
    targets: int


def gather_batch(
    windows: token_windows.TokenWindows, drawn: NDArray[np.int64], *, rows: slice = slice(None), pin: bool = False
) -> Batch:
    """Gather the `rows` of windows `drawn` (B,), page-locked if `pin`; TokenOutOfRange names the first bad window."""
    own = drawn[rows]
    tokens = torch.empty((len(own), windows.block_size + 1), dtype=torch.int64, pin_memory=pin)
    windows.gather(own, into=tokens.numpy())
    return Batch(windows=tuple(drawn.tolist()), tokens=tokens, targets=windows.count_targets(drawn))


class BatchLoader:
    """Prefetches the `rows` of `STEPS_AHEAD` steps before `end_step`, B x (T+1) int64 each."""

    def __init__(
        self,
        windows: token_windows.TokenWindows,
        order: sample_order.SampleOrder,
        device: torch.device,
        *,
        end_step: int,
        rows: slice = slice(None),
    ) -> None:
        self.windows, self.order = windows, order
        self._device, self._end_step, self._rows, self._waited_seconds = device, end_step, rows, 0.0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches", initializer=self._use_device)
        self._prefetched: deque[tuple[int, Future[Batch]]] = deque()
        self._steps_at_once = max(1, DRAWS_PER_CALL // order.global_batch)
        self._drawn_from, self._drawn = 0, np.empty((0, order.global_batch), dtype=np.int64)  # used only by the thread

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Wait for the batch after `step` steps, raise its error, prefetch more; asked again, it is gathered again.

        Other `rows` than before are those of every batch from now on.
        """
        if rows not in (None, self._rows):
            self.forget()
            self._rows = rows
        if not self._prefetched or self._prefetched[0][0] != step:
            self.forget()
            self._read(step)
        _, batch = self._prefetched.popleft()
        for following in range(step + 1 + len(self._prefetched), min(step + 1 + STEPS_AHEAD, self._end_step)):
            self._read(following)
        began = time.perf_counter()
        try:
            return batch.result()
        finally:
            self._waited_seconds += time.perf_counter() - began

    def take_waited_seconds(self) -> float:
        """Return the seconds that `batch` has waited since this was last asked."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def forget(self) -> None:
        """Discard the prefetched batches; they are read again from the shards as they are then."""
        for _, batch in self._prefetched:
            batch.cancel()
        self._prefetched.clear()

    def close(self) -> None:
        """Discard the prefetched batches and wait for the thread to end."""
        self.forget()
        self._thread.shutdown(wait=True)

    def _read(self, step: int) -> None:
        self._prefetched.append((step, self._thread.submit(self._gather, step, self._rows)))

    def _gather(self, step: int, rows: slice) -> Batch:
        if not self._drawn_from <= step < self._drawn_from + len(self._drawn):
            self._drawn_from, self._drawn = step, self.order.windows_between(step, step + self._steps_at_once)
        drawn = self._drawn[step - self._drawn_from]
        return gather_batch(self.windows, drawn, rows=rows, pin=self._device.type == "cuda")

    def _use_device(self) -> None:
        if self._device.type == "cuda":  # page-locked memory belongs to the thread's device
            torch.cuda.set_device(self._device)
