"""The batches of the next steps, gathered in the background while the current one trains.

Owns the reading ahead and page-locked memory. Refuses to hold a position: a batch is a pure function of its step, so
there is nothing to save, and a run resumes by asking for another step. What goes wrong while reading ahead is raised at
the step that would use it, and never for a step nobody asks for.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.data.sample_order import SampleOrder
from model.data.token_windows import TokenWindows
from model.errors import InvalidInput

DRAWS_AT_ONCE = 4096
"""The order is asked for so many draws at a time: of a few, it costs more than their tokens."""

ALL_ROWS = slice(None)

STEPS_AHEAD = 2
"""One batch being gathered and one ready: more helps only where reading is now and then far slower than a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One step's samples on the host: which `windows` (B,) they are, and their token ids `tokens` (B, T+1), int64."""

    windows: tuple[int, ...]
    tokens: Tensor


def gather_batch(windows: TokenWindows, drawn: NDArray[np.int64], *, pin: bool = False) -> Batch:
    """Gather the windows `drawn` (B,) as a batch; `pin` puts it in page-locked memory, for CUDA.

    Raises TokenOutOfRange naming the first window of the batch with an id the vocabulary does not have.
    """
    tokens = torch.empty((len(drawn), windows.block_size + 1), dtype=torch.int64, pin_memory=pin)
    windows.gather(drawn, into=tokens.numpy())
    return Batch(windows=tuple(drawn.tolist()), tokens=tokens)


class BatchLoader:
    """Reads the batches of up to `steps_ahead` further steps in one background thread, and none from `end_step` on.

    At most `steps_ahead` batches of B x (T+1) int64 exist besides the one handed out. Close it, or use it as a context
    manager: then its thread is gone.
    """

    def __init__(
        self,
        windows: TokenWindows,
        order: SampleOrder,
        device: torch.device,
        *,
        end_step: int,
        steps_ahead: int = STEPS_AHEAD,
        rows: slice = ALL_ROWS,
    ) -> None:
        """Read nothing yet: the first batch asked for says where to start; of each it reads only `rows`."""
        if steps_ahead < 1:
            raise InvalidInput(f"steps_ahead={steps_ahead} must be at least 1")
        self.windows = windows
        self.order = order
        self._device, self._end_step, self._steps_ahead, self._rows = device, end_step, steps_ahead, rows
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches", initializer=self._use_device)
        self._coming: deque[tuple[int, Future[Batch]]] = deque()
        self._steps_at_once = max(1, DRAWS_AT_ONCE // order.global_batch)
        self._drawn_from, self._drawn = 0, np.empty((0, order.global_batch), dtype=np.int64)  # the thread's alone

    def batch(self, step: int) -> Batch:
        """Return the batch drawn when `step` steps are complete, waiting for it if need be, and read on behind it.

        Raises what gathering it raised. Asking for the same step again gathers it again.
        """
        if not self._coming or self._coming[0][0] != step:
            self.forget()
            self._read(step)
        _, wanted = self._coming.popleft()
        for following in range(step + 1 + len(self._coming), min(step + 1 + self._steps_ahead, self._end_step)):
            self._read(following)
        return wanted.result()

    def forget(self) -> None:
        """Drop what was read ahead: it is read again, as the shards are by then."""
        for _, coming in self._coming:
            coming.cancel()
        self._coming.clear()

    def close(self) -> None:
        """Stop reading and wait until the thread has ended."""
        self.forget()
        self._thread.shutdown(wait=True)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _read(self, step: int) -> None:
        self._coming.append((step, self._thread.submit(self._gather, step)))

    def _gather(self, step: int) -> Batch:
        if not self._drawn_from <= step < self._drawn_from + len(self._drawn):
            self._drawn_from, self._drawn = step, self.order.windows_between(step, step + self._steps_at_once)
        drawn = self._drawn[step - self._drawn_from, self._rows]
        return gather_batch(self.windows, drawn, pin=self._device.type == "cuda")

    def _use_device(self) -> None:
        if self._device.type == "cuda":  # page-locked memory belongs to the thread's current device
            torch.cuda.set_device(self._device)
