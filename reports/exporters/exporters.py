"""The exporters of a configuration's `[exporters]` section: checked before a run, and run while it trains.

A new exporter is a class beside `TensorBoardExporter`, a key of the section and lines in `run_exporters`. Its thread
only reads and delays no training; an exporter that fails is reported once and retried ever less often.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from cairn.reports.exporters.curve_follower import CurveFollower, CurveUpdate
from cairn.storage.logs import run_log, run_state, step_log
from cairn.tasks.configuration.run_configuration import ExportersConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.process_scopes import repeating_beside

_LONGEST_PAUSE_SECONDS = 300.0
Say = Callable[[str], None]


class Exporter(Protocol):
    """Copies a run's curve to another tool; each call may raise anything and take any time."""

    name: str
    """The tool's name for messages."""

    def begin(self, state: run_state.RunState) -> None:
        """Prepare for the whole curve from its first step, whatever was exported before."""

    def write(self, update: CurveUpdate) -> None:
        """Export what is new."""

    def end(self, state: run_state.RunState) -> None:
        """Record that no process trains the run now; no call follows."""


def check_exporters(wanted: ExportersConfig) -> None:
    """Raise `InvalidConfiguration` where an exporter's library is not installed; opens nothing."""
    for key, tool in (("tensorboard", "TensorBoard"), ("wandb", "W&B")):
        if (folder := getattr(wanted, key)) and find_spec(key) is None:
            raise InvalidConfiguration(
                f"exporters.{key} = {folder!r}: {tool} is not installed; "
                f"`pip install '.[{key}]'` in Cairn's folder installs it, `--set exporters.{key}=` goes without"
            )


@contextmanager
def run_exporters(
    log: run_log.RunLog, wanted: ExportersConfig, environment: Mapping[str, str], say: Say
) -> Iterator[None]:
    """Export the run while the block runs; an exporter that fails does not affect the block."""
    from cairn.reports.exporters import tracking_tools

    exporters = list[Exporter]()
    if wanted.tensorboard:
        exporters.append(tracking_tools.TensorBoardExporter(Path(wanted.tensorboard), log.run_id, log.store.url))
    if wanted.wandb:
        exporters.append(tracking_tools.WandbExporter(Path(wanted.wandb), log.run_id))
    if wanted.mlflow:
        exporters.append(tracking_tools.MlflowExporter(wanted.mlflow, environment, log.run_id))
    with ExitStack() as threads:
        for exporter in exporters:
            threads.enter_context(export_beside(log, exporter, say))
        yield


@contextmanager
def export_beside(
    log: run_log.RunLog, exporter: Exporter, say: Say, *, every_seconds: float = 5.0, final_seconds: float = 10.0
) -> Iterator[None]:
    """Keep one exporter up to date while the block runs; reads the log only as far as the run itself has read it.

    At the end of the block the exporter has `final_seconds` for the rest.
    """
    follower: CurveFollower | None = None
    is_ended = is_reported = False

    def export(is_last: bool) -> None:
        nonlocal follower, is_ended
        following, follower = follower, None  # an update that fails half-way is sent again from the first step
        if following is None:
            exporter.begin(log.state)
            following = CurveFollower(step_log.StepTail(log.store, log.prefix))
        update = CurveUpdate(more=True)
        while update.more:
            update = following.follow(log.state)
            exporter.write(update)
        if is_last:
            exporter.end(log.state)
        follower, is_ended = following, is_last

    def report(error: Exception) -> None:
        nonlocal is_reported
        if not is_reported:
            is_reported = True
            why = " ".join(f"{type(error).__name__}: {error}".split())
            say(f"{exporter.name} cannot be kept up to date, training goes on: {why}")

    times = {"every_seconds": every_seconds, "longest_seconds": _LONGEST_PAUSE_SECONDS, "join_seconds": final_seconds}
    try:
        with repeating_beside(export, report, name=f"{exporter.name}-exporter", **times):
            yield
    finally:
        if not is_ended and not is_reported:
            say(f"{exporter.name} has not received the last steps; the next process that trains this run sends them")
