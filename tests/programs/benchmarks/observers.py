"""All that may look at a run or be told of it, at once: the live page reloaded, exporters, a webhook that hangs."""

import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from cairn.tasks.machine.process_scopes import running_beside
from tests.programs.benchmarks.process_times import tree_core_seconds
from tests.reports.tracking_server import tracking_server
from tests.reports.webhook import serving_hook

RELOAD_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Observers:
    """What a run is told of them, and the page's process."""

    overrides: tuple[str, ...]
    environment: Mapping[str, str]
    page_pid: int

    def page_core_seconds(self) -> float:
        """Return what the page's process has used of a core."""
        return tree_core_seconds(self.page_pid)


@contextmanager
def observing(store: Path, run_id: str, folder: Path) -> Iterator[Observers]:
    """Keep the list, the run's page and its curve open, reloaded every two seconds, while the block runs."""
    store.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "cairn.cli.command", "ui", "--port", "0", "--store", str(store)]
    with (
        tracking_server() as tracking,
        serving_hook() as hook,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as page,
    ):
        hook.hangs = True
        assert page.stdout is not None
        url, token = next(
            found.groups()
            for line in page.stdout
            if (found := re.search(r"(http://127\.0\.0\.1:\d+)/(\?token=\S+)", line))
        )
        folders = {name: folder / name for name in ("tensorboard", "wandb") if find_spec(name)}
        try:
            with running_beside(lambda stop: reload(stop, url, token, run_id), name="reloads"):
                yield Observers(
                    overrides=(
                        *(f"exporters.{name}={path}" for name, path in folders.items()),
                        f"exporters.mlflow={tracking.url}",
                    ),
                    environment={"CAIRN_NOTIFY__WEBHOOK": hook.url},
                    page_pid=page.pid,
                )
        finally:
            hook.let_go.set()
            page.terminate()


def reload(stop: threading.Event, url: str, token: str, run_id: str) -> None:
    """Ask for what a browser with three tabs would ask for; a run that is not there yet is no error."""
    while not stop.wait(RELOAD_SECONDS):
        for path in ("/", f"/runs/{run_id}", "/models", "/metrics"):
            with suppress(OSError), urllib.request.urlopen(url + path + token, timeout=RELOAD_SECONDS) as answer:
                answer.read()
