"""A run in MLflow: one MLflow run for all attempts, with frozen configuration, curve and ends of attempts.

MLflow deletes nothing, so a step is sent only after a checkpoint at or after it is committed. A tag stores the last
step that was sent and its attempt. Steps that are trained again because a checkpoint could not be read are sent again.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from reports.exporters.curve_follower import CurveUpdate, TimedStep
from reports.exporters.mlflow_client import MlflowClient, MlflowRefused
from storage.logs.run_entries import AttemptEnded, EvaluationRecorded
from storage.logs.run_state import RunState
from storage.stores.document import flatten
from tasks.policy.termination import DecisionAction

_AT_ONCE = {"params": 100, "metrics": 1000, "tags": 100}
_MOST_CHARACTERS = 500
_IDENTITY, _SENT_TAG = "cairn.run", "cairn.mirrored"
Metric = Mapping[str, object]


class MlflowExporter:
    """Exports one run to one tracking server."""

    name = "MLflow"

    def __init__(self, client: MlflowClient, run_id: str, *, experiment: str) -> None:
        self._client, self._run_id, self._experiment = client, run_id, experiment
        self._mlflow_run = ""
        self._sent_step = 0
        self._unsettled: list[TimedStep] = []

    def begin(self, state: RunState) -> None:
        """Find the MLflow run by its tag or create it, and read the last step that was sent."""
        opened_at = state.opened_at.isoformat() if state.opened_at else ""
        identity = f"{self._run_id}@{opened_at}"
        answer = self._client.post(
            "runs/search",
            experiment_ids=[self._experiment_id()],
            filter=f"tags.\"{_IDENTITY}\" = '{identity}'",
            max_results=1,
        )
        found = next(iter(answer.get("runs", [])), None)
        self._mlflow_run = found["info"]["run_id"] if found else self._create(identity, state)
        self._sent_step, self._unsettled = _sent_step_of(found, state), []
        self._client.post("runs/update", run_id=self._mlflow_run, status="RUNNING")
        frozen = flatten(state.opened.config) if state.opened else {}
        listed = [{"key": key, "value": str(value)[:_MOST_CHARACTERS]} for key, value in sorted(frozen.items())]
        self._send("params", listed)  # the frozen ones: MLflow allows no parameter to change

    def write(self, update: CurveUpdate) -> None:
        """Send the steps that are committed now."""
        if update.rewind_to is not None:
            self._sent_step = min(self._sent_step, update.rewind_to)
            self._unsettled = [timed for timed in self._unsettled if timed.record.step <= update.rewind_to]
        self._unsettled += update.steps
        settled = [timed for timed in self._unsettled if timed.record.step <= update.settled_step]
        self._unsettled = self._unsettled[len(settled) :]
        unsent = [timed for timed in settled if timed.record.step > self._sent_step]
        self._send("metrics", [*_step_metrics(unsent), *_evaluation_metrics(update.evaluations)])
        self._send("tags", _end_tags(update.ends))
        if unsent:
            last = unsent[-1].record
            self._sent_step = last.step
            self._send("tags", [{"key": _SENT_TAG, "value": f"{last.step}:{last.attempt}"}])

    def end(self, state: RunState) -> None:
        """Set the final status: finished, failed, or killed where the run can continue."""
        ended = state.attempts[-1].ended if state.attempts else None
        status = (
            "FINISHED"
            if state.finished
            else "FAILED"
            if ended and ended.decision.action == DecisionAction.STOP
            else "KILLED"
        )
        at = ended and state.attempts[-1].ended_at
        extra = {"end_time": int(at.timestamp() * 1000)} if at else {}
        self._client.post("runs/update", run_id=self._mlflow_run, status=status, **extra)

    def _experiment_id(self) -> str:
        try:
            found = self._client.get("experiments/get-by-name", experiment_name=self._experiment)
            return str(found["experiment"]["experiment_id"])
        except MlflowRefused as refused:
            if refused.code != "RESOURCE_DOES_NOT_EXIST":
                raise
        try:
            return str(self._client.post("experiments/create", name=self._experiment)["experiment_id"])
        except MlflowRefused as refused:
            if refused.code != "RESOURCE_ALREADY_EXISTS":  # another run began at the same moment
                raise
            found = self._client.get("experiments/get-by-name", experiment_name=self._experiment)
            return str(found["experiment"]["experiment_id"])

    def _create(self, identity: str, state: RunState) -> str:
        opened = state.opened
        tags = {
            _IDENTITY: identity,
            "cairn.model_family": opened.model_family if opened else "",
            "cairn.data_snapshot": opened.data_snapshot if opened else "",
            "cairn.code_version": opened.code_version if opened else "",
        }
        created = self._client.post(
            "runs/create",
            experiment_id=self._experiment_id(),
            run_name=self._run_id,
            start_time=int(state.opened_at.timestamp() * 1000) if state.opened_at else 0,
            tags=[{"key": key, "value": value} for key, value in tags.items()],
        )
        return str(created["run"]["info"]["run_id"])

    def _send(self, kind: str, items: Iterable[Mapping[str, object]]) -> None:
        """Send params, metrics or tags in requests of the size that MLflow takes."""
        left = iter(items)
        while batch := list(islice(left, _AT_ONCE[kind])):
            self._client.post("runs/log-batch", run_id=self._mlflow_run, **{kind: batch})


def _sent_step_of(found: Any, state: RunState) -> int:
    """Return the last sent step of the surviving line: at most the step at which a later attempt resumed."""
    tags = {tag["key"]: tag["value"] for tag in found["data"].get("tags", [])} if found else {}
    step, _, attempt = tags.get(_SENT_TAG, "").partition(":")
    if not (step.isdigit() and attempt.isdigit()):
        return 0
    later = (record.started for record in state.attempts if record.started.attempt > int(attempt))
    return min([int(step), *(started.first_step for started in later)])


def _step_metrics(lines: Sequence[TimedStep]) -> Iterator[Metric]:
    for timed in lines:
        for name, value in timed.values.items():
            yield _metric(name.replace("/", "."), value, timed.at_seconds, timed.record.step)


def _evaluation_metrics(evaluations: Iterable[EvaluationRecorded]) -> Iterator[Metric]:
    for measured in evaluations:
        at = measured.started_at.timestamp() + measured.seconds
        for name, value in measured.metrics.items():
            yield _metric(f"{measured.suite}.{name}", value, at, measured.step)


def _metric(key: str, value: float, at_seconds: float, step: int) -> Metric:
    """Return one value with its own time, so that MLflow stores a value that is sent twice once."""
    shown: object = value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    return {"key": key, "value": shown, "timestamp": int(at_seconds * 1000), "step": step}


def _end_tags(ends: Iterable[AttemptEnded]) -> Iterator[Mapping[str, str]]:
    for ended in ends:
        text = f"{ended.reason} at step {ended.last_step}: {ended.detail}"
        yield {"key": f"cairn.attempt.{ended.attempt:04d}", "value": text[:_MOST_CHARACTERS]}
