"""The trainer that waits for its order: begun while the orchestrator starts, a text is tokenized, a failure backs off.

Importing what a trainer needs takes seconds that depend on nothing. Owns that at most one waits, that one which died
waiting is never used, and that none is left when the run could not begin. Refuses to know runs and orders.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path

from tasks.trainer.trainer_child import TRAINER_COMMAND, TrainerChild

_START_SECONDS = 5.0
"""About what a trainer imports in; one that waits for longer only holds memory."""


class WarmTrainer:
    """At most one trainer without an order."""

    def __init__(self, start: Callable[[Path], TrainerChild] = TrainerChild) -> None:
        """Start nothing yet."""
        self._start = start
        self._child: TrainerChild | None = None
        self._command: tuple[str, ...] = TRAINER_COMMAND

    def use(self, command: Sequence[str]) -> None:
        """Start trainers by this command from now on; one that waits and was started by another is of no use."""
        if tuple(command) != self._command:
            self._command = tuple(command)
            self._start = partial(TrainerChild, command=self._command)
            self._discard()

    def begin(self, work_dir: Path) -> None:
        """Start one whose stderr lies in `work_dir`, unless one is waiting already."""
        if self._child is None or self._is_dead(self._child):
            self._discard()
            self._child = self._start(work_dir)

    def take(self, work_dir: Path) -> TrainerChild:
        """Return the one that waits, else a new one; it is the caller's from now on."""
        self.begin(work_dir)
        child, self._child = self._child, None
        assert child is not None
        return child

    def wait_out(self, seconds: float, work_dir: Path, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Sleep for `seconds` before the next attempt, its trainer starting in the last of them."""
        sleep(max(0.0, seconds - _START_SECONDS))
        self.begin(work_dir)
        sleep(min(seconds, _START_SECONDS))

    def end(self) -> None:
        """End the one that waits, if any."""
        self._discard()

    def _discard(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.discard()

    @staticmethod
    def _is_dead(child: TrainerChild) -> bool:
        return child.process.poll() is not None


_KEPT: ContextVar[WarmTrainer | None] = ContextVar("waiting_trainer", default=None)


@contextmanager
def warm_trainer() -> Iterator[WarmTrainer]:
    """Yield the one kept by whoever called us, else keep one while the block runs.

    The command that starts the flow keeps it across the orchestrator's start; a deployed flow keeps its own.
    """
    kept = _KEPT.get()
    if kept is not None:
        yield kept
        return
    kept = WarmTrainer()
    token = _KEPT.set(kept)
    try:
        yield kept
    finally:
        _KEPT.reset(token)
        kept.end()
