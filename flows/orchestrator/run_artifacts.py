"""Publishes a run's receipts, budgets, evaluations and plot as Prefect artifacts, and its tags, from a thread.

A failing API delays no training; the next version contains what it missed. Task runs carry no tags, because Prefect
asks the API for a concurrency slot before it starts a tagged task.
"""

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.objects import State, StateType
from prefect.states import Crashed

from flows.orchestrator.curve_artifact import Drawing, curve_markdown, is_due
from reports.pages.markdown import markdown_table
from reports.queries.display_tables import budgets_table, evaluations_table, receipts_table
from reports.queries.evaluations import EvaluationSummary, list_evaluations
from reports.queries.receipts import read_receipts
from reports.queries.run_status import read_status
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from tasks.policy.termination import TerminationReason

MOST_LOST_FLOW_RUNS = 20
_UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
_MOST_TASK_RUNS = 200
_FINAL_SECONDS = 10.0
_MOST_EVALUATIONS = 200


class RunArtifacts:
    """Publishes the tables and the plot of a run after each change of its log; the newest state wins."""

    def __init__(self, log: RunLog, flow_run_id: str | None) -> None:
        """Start nothing yet; without a flow run nothing is published."""
        self._log, self._flow_run_id = log, flow_run_id
        self._changed, self._stop = threading.Event(), False
        self._began = time.monotonic()
        self._drawn: Drawing | None = None
        self._shown: dict[str, str] = {}
        self._are_lost_closed = False

    @contextmanager
    def published(self) -> Iterator[None]:
        """Publish in the background while the block runs; the last state has ten seconds at the end."""
        if self._flow_run_id is None:
            yield
            return
        thread = threading.Thread(target=self._publish_all, args=(UUID(self._flow_run_id),), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop = True
            self._changed.set()
            thread.join(_FINAL_SECONDS)

    def change(self) -> None:
        """Mark that the log has changed."""
        self._changed.set()

    def _publish_all(self, flow_run_id: UUID) -> None:
        with suppress(Exception), get_client(sync_client=True) as client:
            last = False
            while not last:
                self._changed.wait()
                last = self._stop
                self._changed.clear()
                with suppress(Exception):  # an API that fails costs one version of a table
                    self._publish(client, flow_run_id)

    def _publish(self, client: SyncPrefectClient, flow_run_id: UUID) -> None:
        reasons = {item.termination_reason for item in read_receipts(self._log) if item.termination_reason}
        client.update_flow_run(flow_run_id, tags=[f"run:{self._log.run_id}", *(f"reason:{name}" for name in reasons)])
        for name, table in self._tables():
            if self._shown.get(name) != table:  # Prefect stores every version
                self._create(client, flow_run_id, name, table)
                self._shown[name] = table
        if self._stop or self._is_curve_due():
            self._publish_curve(client, flow_run_id)
        if not self._are_lost_closed and self._log.state.latest_attempt:
            _end_lost(client, self._log.state, flow_run_id)
            self._are_lost_closed = True

    def _tables(self) -> Iterator[tuple[str, str]]:
        yield "receipts", markdown_table(receipts_table(read_receipts(self._log)[::-1]))
        yield "budgets", markdown_table(budgets_table(read_status(self._log).budgets))
        if evaluations := list_evaluations(self._log.state):
            yield "evaluations", evaluations_markdown(evaluations)

    def _publish_curve(self, client: SyncPrefectClient, flow_run_id: UUID) -> None:
        started, ended = time.monotonic(), self._ended_attempts
        markdown = curve_markdown(self._log)
        if markdown is not None:
            now = time.monotonic()
            self._drawn = Drawing(at_seconds=now, cost_seconds=now - started, ended_attempts=ended)
            self._create(client, flow_run_id, "curve", markdown)

    def _is_curve_due(self) -> bool:
        now = time.monotonic()
        return is_due(self._drawn, now_seconds=now, age_seconds=now - self._began, ended_attempts=self._ended_attempts)

    @property
    def _ended_attempts(self) -> int:
        return sum(attempt.ended is not None for attempt in self._log.state.attempts)

    def _create(self, client: SyncPrefectClient, flow_run_id: UUID, name: str, markdown: str) -> None:
        artifact = ArtifactCreate(
            key=artifact_key(self._log.run_id, name),
            type="markdown",
            description=f"{name} of run {self._log.run_id}, after entry {self._log.seq}",
            data=markdown,
            flow_run_id=flow_run_id,
        )
        client.create_artifact(artifact)


def artifact_key(run_id: str, name: str) -> str:
    """Return the key of an artifact; Prefect allows lower case, digits and dashes."""
    return f"cairn-{re.sub('[^a-z0-9]+', '-', run_id.lower()).strip('-')}-{name}"


def evaluations_markdown(evaluations: Sequence[EvaluationSummary]) -> str:
    """Return the newest 200 evaluations as a Markdown table, newest first."""
    newest = list(reversed(evaluations))[:_MOST_EVALUATIONS]
    table = markdown_table(evaluations_table(newest))
    older = len(evaluations) - len(newest)
    return f"{table}\n\nand {older:,} older ones: `cairn evaluations`" if older else table


def lost_flow_runs(state: RunState, but: UUID) -> tuple[UUID, ...]:
    """Return the flow runs, newest first, whose newest attempt was lost: they are dead or fenced."""
    newest = {a.started.flow_run_id: a.ended for a in state.attempts if a.started.flow_run_id}
    lost = [UUID(name) for name, end in newest.items() if end is not None and end.reason == TerminationReason.LOST]
    return tuple(flow_run_id for flow_run_id in reversed(lost) if flow_run_id != but)[:MOST_LOST_FLOW_RUNS]


def _end_lost(client: SyncPrefectClient, state: RunState, flow_run_id: UUID) -> None:
    """End as `Crashed` what lost attempts have left unfinished in Prefect; raises the API's errors."""
    lost = list(lost_flow_runs(state, flow_run_id))
    if not lost:
        return
    ending: State[Any] = Crashed(
        name="Lost", message=f"its process is gone; flow run {flow_run_id} went on in its place"
    )
    task_runs = filters.TaskRunFilter(
        flow_run_id=filters.TaskRunFilterFlowRunId(any_=lost),
        state=filters.TaskRunFilterState(type=filters.TaskRunFilterStateType(any_=_UNFINISHED)),
    )
    flow_runs = filters.FlowRunFilter(
        id=filters.FlowRunFilterId(any_=lost),
        state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=_UNFINISHED)),
    )
    for task_run in client.read_task_runs(task_run_filter=task_runs, limit=_MOST_TASK_RUNS):
        client.set_task_run_state(task_run.id, ending, force=True)
    for flow_run in client.read_flow_runs(flow_run_filter=flow_runs):
        client.set_flow_run_state(flow_run.id, ending, force=True)
