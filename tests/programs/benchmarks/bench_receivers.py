"""What telling others costs a run, in processor time, which other work on the machine disturbs little.

Each exporter copies a curve of so many steps to a real receiver on this machine (W&B where it is installed); one look
for notices and one scrape of the metrics are timed by themselves. The shares are of steps of `--step-seconds`, and of
the five seconds between two looks. W&B's own process counts only where it has ended; none of this runs in the trainer.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from cairn.reports.exporters.exporters import Exporter
from cairn.reports.exporters.tracking_tools import MlflowExporter, TensorBoardExporter, WandbExporter
from cairn.reports.notices.notice import find_notices
from cairn.reports.queries.run_metrics import RunMetrics
from cairn.storage.logs.registry import RegistryState
from cairn.storage.stores.local_store import LocalStore
from tests.entries import NOON
from tests.fabricated_run import fabricate
from tests.reports.exported_run import ExportedRun, following
from tests.reports.tracking_server import tracking_server

LOOKS = 1000
TICK_SECONDS = 5.0


def core_seconds(work: Callable[[], object]) -> float:
    """Return the processor time of this process and of ended children while the work is done."""
    before = sum(os.times()[:4])
    work()
    return sum(os.times()[:4]) - before


def exporters(folder: Path, url: str) -> Iterator[Exporter]:
    """Yield one exporter of each kind."""
    yield TensorBoardExporter(folder / "board", "bard", "a store")
    yield MlflowExporter(url, {}, "bard")
    if find_spec("wandb"):
        yield WandbExporter(folder / "wandb", "bard")


def measure(steps: int, step_seconds: float, folder: Path) -> None:
    """Print a row for each receiver."""
    run = ExportedRun(run=fabricate(LocalStore(folder / "store"), "bard"))
    run.start()
    run.train(1, steps)
    run.run.commit(steps)
    print("| receiver | processor seconds | each | share of the steps' time |\n|---|---|---|---|")
    with tracking_server() as tracking:  # in this process: what it takes is counted too
        for exporter in exporters(folder, tracking.url):
            spent = core_seconds(following(run, exporter))
            exporter.end(run.state)
            share = spent / (steps * step_seconds)
            print(f"| {exporter.name}, {steps:,} steps | {spent:.2f} | {1e6 * spent / steps:.0f} µs | {share:.3%} |")
    state, metrics = run.state, RunMetrics(run.run.log.store)
    looks: dict[str, Callable[[], object]] = {
        "notices": lambda: list(find_notices("bard", state, lambda alias: RegistryState(), now=NOON)),
        "metrics, in the watcher's process": metrics.text,
    }
    for name, look in looks.items():
        spent = core_seconds(lambda look=look: [look() for _ in range(LOOKS)])  # type: ignore[misc]
        each = spent / LOOKS
        print(f"| {name}, {LOOKS:,} looks | {spent:.2f} | {1e6 * each:.0f} µs | {each / TICK_SECONDS:.3%} |")


def main() -> None:
    """Measure in a folder that is deleted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cairn-bench-") as scratch:
        measure(given.steps, given.step_seconds, Path(scratch))
    print(f"\n{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
