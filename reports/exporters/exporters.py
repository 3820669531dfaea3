"""The exporters of a configuration's `[mirrors]` section: checked before a run, and run while it trains.

A new exporter is a class beside `TensorBoardExporter`, a key of `[mirrors]` and a line in `_make_exporters`. Its thread
only reads and delays no training; an exporter that fails is reported once and retried ever less often.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from cairn.reports.exporters.curve_follower import CurveFollower, CurveUpdate
from cairn.storage.logs import run_log, run_state, step_log
from cairn.tasks.configuration.settings import MirrorsConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.process_scopes import running_beside

_LONGEST_PAUSE_SECONDS = 300.0


class Exporter(Protocol):
    """Copies a run's curve to another tool; each call may raise anything and take any time."""

    @property
    def name(self) -> str:
        """The tool's name for messages."""

    def begin(self, state: run_state.RunState) -> None:
        """Prepare for the whole curve from its first step, whatever was exported before."""

    def write(self, update: CurveUpdate) -> None:
        """Export what is new."""

    def end(self, state: run_state.RunState) -> None:
        """Record that no process trains the run now; no call follows."""


def check_exporters(mirrors: MirrorsConfig) -> None:
    """Raise `InvalidConfiguration` where an exporter's library is not installed; opens nothing."""
    for key, tool in (("tensorboard", "TensorBoard"), ("wandb", "W&B")):
        if (folder := getattr(mirrors, key)) and find_spec(key) is None:
            raise InvalidConfiguration(
                f"mirrors.{key} = {folder!r}: {tool} is not installed; "
                f"`pip install 'cairn-train[{key}]'` installs it, `--set mirrors.{key}=` goes without"
            )


@contextmanager
def run_exporters(
    log: run_log.RunLog, mirrors: MirrorsConfig, environment: Mapping[str, str], say: Callable[[str], None]
) -> Iterator[None]:
    """Export the run while the block runs; an exporter that fails does not affect the block."""
    with ExitStack() as threads:
        for exporter in _make_exporters(log, mirrors, environment):
            threads.enter_context(ExporterThread(log, exporter, say).run())
        yield


def _make_exporters(log: run_log.RunLog, mirrors: MirrorsConfig, environment: Mapping[str, str]) -> Iterator[Exporter]:
    if mirrors.tensorboard:
        from cairn.reports.exporters.tensorboard_exporter import TensorBoardExporter

        yield TensorBoardExporter(Path(mirrors.tensorboard), log.run_id, log.store.url)
    if mirrors.wandb:
        from cairn.reports.exporters.wandb_exporter import WandbExporter

        yield WandbExporter(Path(mirrors.wandb), log.run_id)
    if mirrors.mlflow:
        from cairn.reports.exporters.mlflow_exporter import MlflowClient, MlflowExporter

        experiment = environment.get("MLFLOW_EXPERIMENT_NAME") or "cairn"
        yield MlflowExporter(MlflowClient(mirrors.mlflow, environment), log.run_id, experiment=experiment)


class ExporterThread:
    """Keeps one exporter up to date while a run trains; reads the log only as far as the run itself has read it."""

    def __init__(
        self,
        log: run_log.RunLog,
        exporter: Exporter,
        say: Callable[[str], None],
        *,
        every_seconds: float = 5.0,
        final_seconds: float = 10.0,
    ) -> None:
        self._log, self._exporter, self._say = log, exporter, say
        self._every_seconds, self._final_seconds = every_seconds, final_seconds
        self._follower: CurveFollower | None = None
        self._failures, self._is_reported, self._is_ended = 0, False, False

    @contextmanager
    def run(self) -> Iterator[None]:
        """Export while the block runs; at its end the exporter has `final_seconds` for the rest."""
        name = self._exporter.name
        try:
            with running_beside(self._export, name=f"{name}-exporter", join_seconds=self._final_seconds):
                yield
        finally:
            if not self._is_ended and not self._is_reported:
                self._say(f"{name} has not received the last steps; the next process that trains this run sends them")

    def _export(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._try()
            stop.wait(min(self._every_seconds * 2**self._failures, _LONGEST_PAUSE_SECONDS))
        self._try(is_last=True)
        self._is_ended = True

    def _try(self, *, is_last: bool = False) -> None:
        try:
            if self._follower is None:
                self._exporter.begin(self._log.state)
                self._follower = CurveFollower(step_log.StepTail(self._log.store, self._log.prefix))
            update = CurveUpdate(more=True)
            while update.more:
                update = self._follower.follow(self._log.state)
                self._exporter.write(update)
            if is_last:
                self._exporter.end(self._log.state)
            self._failures = 0
        except Exception as error:
            self._follower = None  # an update that failed half-way is sent again from the first step
            self._failures += 1
            if not self._is_reported:
                self._is_reported = True
                with suppress(Exception):
                    why = " ".join(f"{type(error).__name__}: {error}".split())
                    self._say(f"{self._exporter.name} cannot be kept up to date, training goes on: {why}")
