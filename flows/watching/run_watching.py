"""What `cairn watch` and the flow `watch-runs` have in common: from a request to a watcher, and its end.

Owns which continuation is meant, where this machine's watchers keep their memory, and that a watcher told to stop
leaves at once: what it has begun goes on without it.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flows.watching.run_continuation import Continuation, ContinuationHere
from flows.watching.run_pulse import RunPulse
from flows.watching.run_watcher import RunWatcher, WatchRow
from flows.watching.watcher_memory import WatcherMemory
from storage.stores.open_store import open_store
from tasks.attempt.exit_on_sigterm import Terminated, preempted_by_sigterm
from tasks.errors import InvalidConfiguration
from tasks.machine.work_folder import work_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchRequest:
    """What a watcher was asked for: a store, and by which deployment runs are continued; none: on this machine."""

    store: str
    deployment: str = ""
    every_seconds: float = 30.0
    at_most: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if not self.every_seconds > 0:
            raise InvalidConfiguration(f"--every {self.every_seconds}: must be more than 0 seconds")
        if self.at_most < 1:
            raise InvalidConfiguration(f"--at-most {self.at_most}: must be at least 1")


def watcher(request: WatchRequest) -> RunWatcher:
    """Return a watcher as asked for; raises what is wrong with the request."""
    store = open_store(request.store)
    folder = work_folder(os.environ) / "watch" / hashlib.sha256(store.url.encode()).hexdigest()[:12]
    return RunWatcher(
        store,
        _continuation(request, store.url, folder),
        WatcherMemory(folder / "sightings.json", monotonic=time.monotonic),
        monotonic=time.monotonic,
        sleep=time.sleep,
    )


def watch_until_stopped(
    request: WatchRequest,
    *,
    tell: Callable[[tuple[WatchRow, ...]], None],
    show: Callable[[tuple[RunPulse, ...]], None],
    say: Callable[[str], None],
) -> None:
    """Look again and again until SIGTERM or Ctrl-C: `tell` what is new, if anything is, and `show` how far runs are."""
    try:
        with preempted_by_sigterm():
            watching = watcher(request)

            def looked(rows: tuple[WatchRow, ...]) -> None:
                if rows:
                    tell(rows)
                show(watching.pulses())

            watching.watch(every_seconds=request.every_seconds, tell=looked, say=say)
    except (Terminated, KeyboardInterrupt):
        say("stopped watching; what was continued goes on")


def _continuation(request: WatchRequest, store_url: str, folder: Path) -> Continuation:
    if not request.deployment:
        return ContinuationHere(folder, store_url, at_most=request.at_most)
    from flows.watching.deployed_continuation import ContinuationByDeployment

    return ContinuationByDeployment(request.deployment, store_url)
