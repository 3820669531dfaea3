"""A run in Weights & Biases, offline: a folder that `wandb sync` sends, with the whole curve of the surviving line.

W&B takes nothing back, so a step is written only after a checkpoint at or after it is committed. Each process that
trains the run writes a new folder under the same W&B id and deletes those of earlier processes.
"""

import shutil
from pathlib import Path
from typing import Any

from cairn.reports.exporters.curve_follower import CurveUpdate
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.document import flatten, sha256

_STEP = "step"


class WandbExporter:
    """Writes one run's offline folder; `wandb` starts a process of its own, and no network is used."""

    name = "W&B"

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder, self._run_id = folder, run_id
        self._run: Any = None

    def begin(self, state: RunState) -> None:
        """Start a new folder, and delete those of earlier processes."""
        import wandb

        self._close()
        self._folder.mkdir(parents=True, exist_ok=True)
        opened_at = state.opened_at.isoformat() if state.opened_at else ""
        identity = sha256(f"{self._run_id}@{opened_at}".encode())[:16]
        for earlier in (self._folder / "wandb").glob(f"offline-run-*-{identity}"):
            shutil.rmtree(earlier, ignore_errors=True)
        settings = wandb.Settings(
            mode="offline",
            root_dir=str(self._folder),
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
        )
        names: Any = {"project": "cairn", "id": identity, "name": self._run_id}
        config = flatten(state.opened.config) if state.opened else {}
        self._run = wandb.init(**names, config=config, settings=settings, reinit="create_new", resume="allow")
        self._run.define_metric("*", step_metric=_STEP)

    def write(self, update: CurveUpdate) -> None:
        """Write the steps that are committed now, and the evaluations."""
        for point in (*update.settled, *update.evaluations):
            self._run.log({_STEP: point.step, **point.values})
        for ended in update.ends:
            self._run.summary[f"attempt.{ended.attempt:04d}"] = f"{ended.reason} at step {ended.last_step}"

    def end(self, state: RunState) -> None:
        """Close the folder; exit code 0 says that the run is finished."""
        self._close(0 if state.finished else 1)

    def _close(self, exit_code: int = 1) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=exit_code)
