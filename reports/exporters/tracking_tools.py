"""A run's curve in TensorBoard, Weights & Biases and MLflow, unbroken however often the run was interrupted.

TensorBoard: each process writes a new event file with the whole curve and deletes those of earlier processes; a session
start drops all later steps before it. W&B, offline: a folder that `wandb sync` sends. MLflow: one MLflow run, by its
REST API; a tag stores the last step sent. The latter two take nothing back, so a step is written only after a
checkpoint at or after it is committed; steps trained again because a checkpoint was unreadable are sent again.
Sources: TensorBoard's event format (event.proto, record_writer.py; "brain.Event:2"); MLflow REST API 2.0 (mlflow.org).
"""

import base64
import json
import math
import os
import shutil
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from cairn.reports.errors import ReportError
from cairn.reports.exporters.curve_follower import CurveUpdate
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.codec import flatten, sha256
from cairn.tasks.machine.http_request import open_directly
from cairn.tasks.policy.termination import DecisionAction


class TensorBoardExporter:
    """Writes one run's event file."""

    name = "TensorBoard"

    def __init__(self, folder: Path, run_id: str, store_url: str) -> None:
        self._folder, self._suffix = folder / run_id, f".cairn-{sha256(store_url.encode())[:8]}"
        # TensorBoard draws a folder as one run, so a run of this name from another store gets another one.
        self._beside = folder / f"{run_id}{self._suffix}"
        self._file: BinaryIO | None = None
        self._records: Any = None

    def begin(self, state: RunState) -> None:
        """Start a new file, and delete those of earlier processes."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.end(state)  # that of an update which failed
        earlier = [path for folder in (self._folder, self._beside) for path in folder.glob(f"*{self._suffix}")]
        folder = self._beside if {*self._folder.glob("*.cairn-*")} - {*earlier} else self._folder
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        unique = f"{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / f"events.out.tfevents.{unique}{self._suffix}").open("xb")
        self._records = RecordWriter(self._file)
        self._add(now, 0, file_version="brain.Event:2")
        self._add(now, 0, session_log={"status": "START"})
        self._file.flush()
        for path in earlier:
            path.unlink(missing_ok=True)

    def write(self, update: CurveUpdate) -> None:
        """Append the update and flush it to the operating system."""
        if update.rewind_to is not None:
            self._add(time.time(), update.rewind_to + 1, session_log={"status": "START"})
        for point in (*update.steps, *update.evaluations):
            scalars = [{"tag": tag, "simple_value": value} for tag, value in point.values.items()]
            self._add(point.at_seconds, point.step, summary={"value": scalars})
        if self._file is not None:
            self._file.flush()

    def end(self, state: RunState) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _add(self, at_seconds: float, step: int, **content: object) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=at_seconds, step=step, **content).SerializeToString())


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
        identity = sha256(f"{self._run_id}@{state.opening}".encode())[:16]
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


_AT_ONCE = {"params": 100, "metrics": 1000, "tags": 100}
_IDENTITY, _SENT_TAG = "cairn.run", "cairn.exported"
_MOST_CHARACTERS, _SHOWN_CHARACTERS = 500, 200
_TIMEOUT_SECONDS, _MOST_BYTES = 10.0, 8 << 20


class MlflowRefused(ReportError):
    """The tracking server refused a request; `code` is its error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class MlflowExporter:
    """Exports one run to one tracking server, and follows no redirect to another; a request ends after ten seconds."""

    name = "MLflow"

    def __init__(self, address: str, environment: Mapping[str, str], run_id: str) -> None:
        """Send nothing yet; experiment and credentials come from MLflow's environment variables."""
        self._run_id, self._experiment = run_id, environment.get("MLFLOW_EXPERIMENT_NAME") or "cairn"
        self._mlflow_run, self._sent_step = "", 0
        self._root = f"{address.rstrip('/')}/api/2.0/mlflow/"
        self._headers = {"Content-Type": "application/json"}
        if token := environment.get("MLFLOW_TRACKING_TOKEN"):
            self._headers["Authorization"] = f"Bearer {token}"
        elif user := environment.get("MLFLOW_TRACKING_USERNAME"):
            pair = f"{user}:{environment.get('MLFLOW_TRACKING_PASSWORD', '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"

    def ask(self, path: str, query: Mapping[str, str] | None = None, /, **content: object) -> Any:
        """Send a request, a GET with its query or a POST with its content, and return the answer."""
        address, data = f"{self._root}{path}", None if query else json.dumps(content, allow_nan=False).encode()
        address += f"?{urllib.parse.urlencode(query)}" if query else ""
        request = urllib.request.Request(address, data, self._headers)
        try:
            with open_directly(request, timeout_seconds=_TIMEOUT_SECONDS) as answer:
                data = answer.read(_MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                body = error.read(_MOST_BYTES).decode(errors="replace")
            code, message = f"HTTP {error.code}", body
            with suppress(ValueError, KeyError, TypeError):
                document = json.loads(body)
                code, message = str(document["error_code"]), str(document.get("message", ""))
            raise MlflowRefused(code, message[:_SHOWN_CHARACTERS]) from error
        if len(data) > _MOST_BYTES:
            raise ReportError(f"{self._root} answered more than {_MOST_BYTES:,} bytes")
        return json.loads(data or b"{}")

    def begin(self, state: RunState) -> None:
        """Find the MLflow run by its tag or create it, and read the last step that was sent."""
        identity = f"{self._run_id}@{state.opening}"
        try:
            experiment = self.ask("experiments/create", name=self._experiment)
        except MlflowRefused as refused:
            if refused.code not in ("RESOURCE_ALREADY_EXISTS", "PERMISSION_DENIED"):
                raise
            experiment = self.ask("experiments/get-by-name", {"experiment_name": self._experiment})["experiment"]
        number, same = str(experiment["experiment_id"]), f"tags.\"{_IDENTITY}\" = '{identity}'"
        answer = self.ask("runs/search", experiment_ids=[number], filter=same, max_results=1)
        found = next(iter(answer.get("runs", [])), None)
        if found is None:
            names = ("model_family", "data_snapshot", "code_version")
            named = {_IDENTITY: identity} | {f"cairn.{name}": getattr(state.opened, name, "") for name in names}
            pairs = [{"key": key, "value": value} for key, value in named.items()]
            began = int(state.opened_at.timestamp() * 1000) if state.opened_at else 0
            content = {"run_name": self._run_id, "start_time": began, "tags": pairs}
            found = self.ask("runs/create", experiment_id=number, **content)["run"]
        self._mlflow_run = str(found["info"]["run_id"])
        tags = {tag["key"]: tag["value"] for tag in found.get("data", {}).get("tags", [])}
        step, _, attempt = tags.get(_SENT_TAG, "").partition(":")
        self._sent_step = 0
        if step.isdigit() and attempt.isdigit():  # of the surviving line: at most where a later attempt resumed
            later = (record.started for record in state.attempts if record.started.attempt > int(attempt))
            self._sent_step = min([int(step), *(started.first_step for started in later)])
        self.ask("runs/update", run_id=self._mlflow_run, status="RUNNING")
        frozen = flatten(state.opened.config) if state.opened else {}
        listed = [{"key": key, "value": str(value)[:_MOST_CHARACTERS]} for key, value in sorted(frozen.items())]
        self._send("params", listed)  # the frozen ones: MLflow allows no parameter to change

    def write(self, update: CurveUpdate) -> None:
        """Send the steps that are committed now."""
        if update.rewind_to is not None:
            self._sent_step = min(self._sent_step, update.rewind_to)
        unsent = [point for point in update.settled if point.step > self._sent_step]
        metrics = list[Mapping[str, object]]()
        for point in (*unsent, *update.evaluations):
            # Each value has its own time, so that MLflow stores a value that is sent twice once.
            at = {"timestamp": int(point.at_seconds * 1000), "step": point.step}
            for name, value in point.values.items():
                other = "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
                metrics.append({"key": name.replace("/", "."), "value": value if math.isfinite(value) else other, **at})
        self._send("metrics", metrics)
        ends = [(end.attempt, f"{end.reason} at step {end.last_step}: {end.detail}") for end in update.ends]
        self._send("tags", ({"key": f"cairn.attempt.{n:04d}", "value": text[:_MOST_CHARACTERS]} for n, text in ends))
        if unsent:
            last = unsent[-1]
            self._sent_step = last.step
            self._send("tags", [{"key": _SENT_TAG, "value": f"{last.step}:{last.attempt}"}])

    def end(self, state: RunState) -> None:
        """Set the final status: finished, failed, or killed where the run can continue."""
        ended = state.attempts[-1].ended if state.attempts else None
        status = "FAILED" if ended and ended.decision.action == DecisionAction.STOP else "KILLED"
        status = "FINISHED" if state.finished else status
        at = ended and state.attempts[-1].ended_at
        extra = {"end_time": int(at.timestamp() * 1000)} if at else {}
        self.ask("runs/update", run_id=self._mlflow_run, status=status, **extra)

    def _send(self, kind: str, items: Iterable[Mapping[str, object]]) -> None:
        """Send params, metrics or tags in requests of the size that MLflow takes."""
        left = iter(items)
        while batch := list(islice(left, _AT_ONCE[kind])):
            self.ask("runs/log-batch", run_id=self._mlflow_run, **{kind: batch})
