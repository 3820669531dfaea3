"""A machine that is not the first of several: it lends its processes to attempt after attempt until the run has ended.

Owns that loop. The first machine decides and records; this one reads the run's log to know when there is nothing left
to do, and starts its part of the trainer anew for each attempt, which waits for the first machine's at the rendezvous.
Refuses to append anything.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from storage.errors import StoreUnavailable
from storage.logs.run_entries import AttemptEnded
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from tasks.policy.termination import RESTARTABLE, DecisionAction
from tasks.trainer.trainer_group import TrainerGroup

_LOOK_SECONDS = 2.0
_AGAIN_SECONDS = 1.0


def is_other_node(environment: Mapping[str, str]) -> bool:
    """Whether this is one of several machines, and not the first."""
    return environment.get("CAIRN_NODE_RANK", "0") not in ("", "0")


class NodeService:
    """This machine's part in a run."""

    def __init__(
        self, log: RunLog, group: TrainerGroup, folder: Path, *, say: Callable[[str], None], patience_seconds: float
    ) -> None:
        """Serve nothing yet; without an attempt for `patience_seconds` it will give up waiting."""
        self._log, self._group, self._folder = log, group, folder
        self._say, self._patience_seconds = say, patience_seconds
        self._leaving = threading.Event()
        self._known_ends = len(_ends(log.refresh()))
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> bool:
        """Serve until the run has ended; False where it was told to leave, or no attempt came."""
        attempts, since = -1, time.monotonic()
        with self._notices():
            try:
                while (end := self._end()) is None and not self._leaving.is_set():
                    state = self._log.state
                    if state.open_attempt is not None or len(state.attempts) != attempts:
                        attempts, since = len(state.attempts), time.monotonic()
                    if time.monotonic() - since > self._patience_seconds:
                        self._say(f"no attempt for {self._patience_seconds:.0f} s; the same command waits again")
                        return False
                    self._take_part()
                if end is not None:
                    self._say(end)
                return end is not None
            finally:
                self._let_go()

    def _take_part(self) -> None:
        """Be there for an attempt, and look again soon."""
        if self._child is None:
            self._child = self._start()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=_LOOK_SECONDS)
            self._child = None
            self._leaving.wait(_AGAIN_SECONDS)

    def _let_go(self) -> None:
        """End what still waits here; ranks that were told to leave have the time that the first machine gives them."""
        if self._child is None:
            return
        if self._leaving.is_set():
            self._child.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _end(self) -> str | None:
        with suppress(StoreUnavailable):  # training needs the store as well, and says so
            self._log.refresh()
        state = self._log.state
        if state.finished is not None:
            return f"run {self._log.run_id} is finished"
        stopped = [ended for ended in _ends(state)[self._known_ends :] if ended.decision.action == DecisionAction.STOP]
        over = [ended for ended in stopped if ended.reason not in RESTARTABLE]
        return f"run {self._log.run_id} has stopped: {over[-1].detail}" if over else None

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            self._group.command(),
            env={**os.environ, "CAIRN_NODE_FOLDER": str(self._folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    @contextmanager
    def _notices(self) -> Iterator[None]:
        """A notice to this machine is one to the whole run: its ranks stop behind their step, and so do all others."""

        def leave(number: int, frame: FrameType | None) -> None:
            self._leaving.set()
            if self._child is not None:
                self._child.send_signal(signal.SIGTERM)

        before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _ends(state: RunState) -> list[AttemptEnded]:
    return [attempt.ended for attempt in state.attempts if attempt.ended is not None]
