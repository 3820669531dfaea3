"""The exporters of a configuration's `[mirrors]` section: checked before a run, and run while it trains.

A new exporter is a class beside `TensorBoardExporter`, a key of `[mirrors]` and a line in `_make_exporters`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from reports.exporters.step_exporter import Exporter, ExporterThread
from storage.logs.run_log import RunLog
from tasks.configuration.settings import MirrorsConfig
from tasks.errors import InvalidConfiguration

_EXPERIMENT = "cairn"


def check_exporters(mirrors: MirrorsConfig) -> None:
    """Raise `InvalidConfiguration` where an exporter's library is not installed; opens nothing."""
    if mirrors.tensorboard and find_spec("tensorboard") is None:
        raise InvalidConfiguration(
            f"mirrors.tensorboard = {mirrors.tensorboard!r}: TensorBoard is not installed; "
            "`pip install 'cairn-train[tensorboard]'` installs it, `--set mirrors.tensorboard=` goes without"
        )


@contextmanager
def run_exporters(
    log: RunLog, mirrors: MirrorsConfig, environment: Mapping[str, str], say: Callable[[str], None]
) -> Iterator[None]:
    """Export the run while the block runs; an exporter that fails does not affect the block."""
    with ExitStack() as threads:
        for exporter in _make_exporters(log, mirrors, environment):
            threads.enter_context(ExporterThread(log, exporter, say).run())
        yield


def _make_exporters(log: RunLog, mirrors: MirrorsConfig, environment: Mapping[str, str]) -> Iterator[Exporter]:
    if mirrors.tensorboard:
        from reports.exporters.tensorboard_exporter import TensorBoardExporter

        yield TensorBoardExporter(Path(mirrors.tensorboard), log.run_id, log.store.url)
    if mirrors.mlflow:
        from reports.exporters.mlflow_client import MlflowClient
        from reports.exporters.mlflow_exporter import MlflowExporter

        experiment = environment.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
        yield MlflowExporter(MlflowClient(mirrors.mlflow, environment), log.run_id, experiment=experiment)
