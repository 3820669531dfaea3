"""What `cairn watch` and the flow `watch-runs` share: from a request to a watcher, and its end."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flows.watching.run_continuation import Continuation, ContinuationHere
from flows.watching.run_pulse import RunPulse
from flows.watching.run_watcher import RunWatcher, WatchRow
from flows.watching.watcher_memory import WatcherMemory
from storage.stores.document import sha256
from storage.stores.open_store import open_store
from tasks.attempt.shutdown_signal import Terminated, raise_on_sigterm
from tasks.errors import InvalidConfiguration
from tasks.machine.work_folder import work_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchRequest:
    """The store to watch, and the deployment that continues its runs; empty: processes of this machine."""

    store: str
    deployment: str = ""
    every_seconds: float = 30.0
    at_most: int = 1

    def __post_init__(self) -> None:
        """Refuse impossible numbers."""
        if not self.every_seconds > 0:
            raise InvalidConfiguration(f"--every {self.every_seconds}: must be more than 0 seconds")
        if self.at_most < 1:
            raise InvalidConfiguration(f"--at-most {self.at_most}: must be at least 1")


def open_watcher(request: WatchRequest) -> RunWatcher:
    """Return a watcher for the request; raises `InvalidConfiguration`."""
    store = open_store(request.store)
    folder = work_folder(os.environ) / "watch" / sha256(store.url.encode())[:12]
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
    print_rows: Callable[[tuple[WatchRow, ...]], None],
    show: Callable[[tuple[RunPulse, ...]], None],
    say: Callable[[str], None],
) -> None:
    """Look again and again until SIGTERM or Ctrl-C: print what is new, and show how far the runs are."""
    try:
        with raise_on_sigterm():
            watcher = open_watcher(request)

            def report(rows: tuple[WatchRow, ...]) -> None:
                if rows:
                    print_rows(rows)
                show(watcher.pulses())

            watcher.watch(every_seconds=request.every_seconds, report=report, say=say)
    except (Terminated, KeyboardInterrupt):
        say("stopped watching; what was continued goes on")


def _continuation(request: WatchRequest, store_url: str, folder: Path) -> Continuation:
    if not request.deployment:
        return ContinuationHere(folder, store_url, at_most=request.at_most)
    from flows.watching.deployed_continuation import ContinuationByDeployment

    return ContinuationByDeployment(request.deployment, store_url)
