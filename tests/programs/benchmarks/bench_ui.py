"""The live page over a thousand runs, and the plot of a run of a million steps in a real Chromium.

python -m tests.programs.benchmarks.bench_ui: seconds by the clock and of a core of the first answer (nothing is
cached), of the first after a restart (rows are packed), of one that reads what moved, and of one that reads nothing;
then reading, thinning and drawing.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cairn.reports.plots.plot_axis import view_curves
from cairn.reports.plots.run_curves import gather_curves
from cairn.storage.logs.step_log import step_log_key
from cairn.storage.stores.local_store import LocalStore
from tests.cairn.live_server import served
from tests.crash.chromium import started_chromium
from tests.entries import step_record
from tests.fabricated_run import FabricatedRun, fabricate


def make_runs(store: LocalStore, count: int) -> FabricatedRun:
    """Return the one run that is still open."""
    for number in range(count):
        run = fabricate(store, f"run-{number:04d}")
        run.start()
        newest = run.commit(10)
        run.evaluate(newest, loss=3.0 - number / count)
        if number < count - 1:
            run.end("preempted", action="resume", charged="preempted")
            run.start()
            newest = run.commit(40)
            run.evaluate(newest, loss=2.0 - number / count)
            run.finish(newest)
            run.end("completed", action="finish")
    run.beat(11)
    return run


def write_steps(run: FabricatedRun, steps: int) -> None:
    """Write the step records of the first attempt."""
    path = run.log.store.local_path(step_log_key(run.log.prefix, 1))
    assert path is not None
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        for step in range(1, steps + 1):
            loss = 2.0 + 8.0 / (step**0.3) + (step * 7919 % 1000) / 2000
            record = step_record(step, 1, train_loss=loss, grad_norm=1 + loss / 10)
            file.write(msgspec.json.encode(record) + b"\n")


def timed(what: str, do: Callable[[], object]) -> None:
    """Print how long it takes, and how much of a core."""
    began, busy = time.perf_counter(), time.process_time()
    do()
    print(f"{what}: {time.perf_counter() - began:.2f} s ({time.process_time() - busy:.2f} s of a core)", flush=True)


def main() -> None:
    """Make the store and measure."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=1000)
    options.add_argument("--steps", type=int, default=1_000_000)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder) / "store")
        timed(f"making {chosen.runs} runs", lambda: make_runs(store, chosen.runs))
        gc.freeze()  # what made the runs is not what is looked through while they are read
        open_run = fabricate(store, "open")
        open_run.start()
        with served(store, Path(folder) / "work") as live:
            timed("the first page of all", lambda: live.ask("/"))
        with served(store, Path(folder) / "work") as live:
            timed("the first page after a restart", lambda: live.ask("/"))
            for step in range(3):
                open_run.beat(step)
                timed("a page after a heartbeat", lambda: live.ask("/"))
            timed("a page that is not read again", lambda: live.ask("/", wait=0))
            timed("a search", lambda: live.ask("/?q=run-00&sort=val_loss", wait=0))
            write_steps(open_run, chosen.steps)
            timed(f"the page of a run of {chosen.steps:,} steps", lambda: live.ask("/runs/open"))
            timed("the same after a heartbeat", lambda: (open_run.beat(9), live.ask("/runs/open")))
            curves = gather_curves(open_run.log)
            timed("thinning it", lambda: view_curves(curves))
            with started_chromium() as browser:
                page = browser.new_page(viewport={"width": 1400, "height": 900})
                page.goto(live.at("/runs/open"))
                for theme in ("light", "dark", "light"):
                    canvas = page.locator("[data-canvas][data-milliseconds]")
                    canvas.wait_for()
                    drawn = [canvas.get_attribute(f"data-{name}") for name in ("points", "milliseconds")]
                    print(f"drawing {drawn[0]} points: {drawn[1]} ms", flush=True)
                    page.emulate_media(color_scheme="dark" if theme == "light" else "light")
                    page.wait_for_timeout(1500)


if __name__ == "__main__":
    main()
