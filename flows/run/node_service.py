"""Serves a run from a machine that is not its first: reads the log and starts this machine's ranks for each attempt."""

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

_POLL_SECONDS = 2.0
_RESTART_SECONDS = 1.0


def is_other_node(environment: Mapping[str, str]) -> bool:
    """Whether this is one of several machines, and not the first."""
    return environment.get("CAIRN_NODE_RANK", "0") not in ("", "0")


class NodeService:
    """The ranks of this machine in attempt after attempt."""

    def __init__(
        self, log: RunLog, group: TrainerGroup, folder: Path, *, say: Callable[[str], None], wait_seconds: float
    ) -> None:
        """Start nothing yet; gives up after `wait_seconds` without an attempt."""
        self._log, self._group, self._folder = log, group, folder
        self._say, self._wait_seconds = say, wait_seconds
        self._leaving = threading.Event()
        self._known_ends = len(_ends(log.refresh()))
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> bool:
        """Serve until the run has ended; returns False after a shutdown request, or without an attempt for too long."""
        attempts, since = -1, time.monotonic()
        with self._passing_on_signals():
            try:
                while (end := self._end()) is None and not self._leaving.is_set():
                    state = self._log.state
                    if state.open_attempt is not None or len(state.attempts) != attempts:
                        attempts, since = len(state.attempts), time.monotonic()
                    if time.monotonic() - since > self._wait_seconds:
                        self._say(f"no attempt for {self._wait_seconds:.0f} s; the same command waits again")
                        return False
                    self._child = self._child or self._start()
                    with suppress(subprocess.TimeoutExpired):
                        self._child.wait(timeout=_POLL_SECONDS)
                        self._child = None
                        self._leaving.wait(_RESTART_SECONDS)
                if end is not None:
                    self._say(end)
                return end is not None
            finally:
                self._end_ranks()

    def _end_ranks(self) -> None:
        """End the ranks; after a shutdown request the first machine gives them their time."""
        if self._child is None:
            return
        if self._leaving.is_set():
            self._child.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _end(self) -> str | None:
        with suppress(StoreUnavailable):  # training needs the store as well, and reports it
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
    def _passing_on_signals(self) -> Iterator[None]:
        """Pass SIGTERM and Ctrl-C on to this machine's ranks: they end after their step, and so do all others."""

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
