"""Stands in for what a watcher begins: it continues nothing and remembers what it was told to."""

from cairn.storage.logs.run_log import RunLog
from cairn.tasks.policy.run_watch import WatchAction


class Recorded:
    """Remembers the runs in `begun`; for the run `fails` no process can be started."""

    def __init__(self, fails: str = "") -> None:
        self.begun: list[str] = []
        self._fails = fails

    def begin(self, log: RunLog, *, silent_seconds: float) -> tuple[WatchAction, str]:
        if log.run_id == self._fails:
            raise RuntimeError("no process can be started")
        self.begun.append(log.run_id)
        return WatchAction.CONTINUED, "remembered"

    def where(self, run_id: str) -> str:
        return "here"
