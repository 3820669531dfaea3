"""One page of a run in Prefect: its state, curve, receipts, budgets and evaluations, kept current from a thread.

A failing API delays no training; the next version contains what it missed. Task runs carry no tags, because Prefect
asks the API for a concurrency slot before it starts a tagged task.
"""

import base64
import json
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import NAMESPACE_URL, UUID, uuid5

from prefect import State, exceptions, get_client, states
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.events import emit_event

from cairn.flows.orchestrator.flow_run import FlowRun
from cairn.reports.plots.run_curves import ReadSteps, describe_run, gather_curves
from cairn.reports.queries import receipts, run_lookup, run_status
from cairn.reports.queries.evaluations import EvaluationComparison, list_evaluations
from cairn.reports.text import display_tables as tables
from cairn.storage.logs import run_log, run_state, step_log
from cairn.storage.stores import codec, object_store
from cairn.tasks.configuration import addresses, settings
from cairn.tasks.machine.process_scopes import running_beside
from cairn.tasks.policy.termination import TerminationReason
from cairn.tasks.text.format import format_duration, format_money

MOST_LOST_FLOW_RUNS = 20
ATTEMPT_ENDED = "cairn.attempt.ended"
_TOGETHER_SECONDS = 2.0
"""Changes within these are published together: a page is 100 kB, most of it the curve."""
_LEAST_SECONDS = 60.0
_SHARE_OF_AGE, _PAUSE_PER_COST = 0.05, 20.0
"""Prefect stores every plot, so a long run draws seldom; drawing takes at most a twentieth of one core."""

_OF_ATTEMPTS = ("attempt", "started (UTC)", "lasted", "reason", "steps", "device time", "lost", "decision")
_OF_EVALUATIONS = ("step", "status", "suite", "val_loss", "perplexity", "bits/byte", "verdict")
"""The columns that fit beside Prefect's menus; `cairn attempts` and `cairn evaluations` have all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationForm:
    """The form; `kept` are parameters of the flow run that shows it, `suites` the suite files of its folder."""

    deployment_id: UUID
    kept: Mapping[str, Any]
    suites: tuple[Path, ...]

    def links(self, reference: str) -> str:
        """Return the line of links for a checkpoint: under its run's suites again, and under each suite file."""
        forms: dict[str, dict[str, Any]] = {"its run's own suites": {"again": True}}
        links = []
        for name, form in (forms | {path.stem: {"suite": str(path)} for path in self.suites}).items():
            values = quote(json.dumps({"reference": reference, **self.kept, **form}), safe="")
            address = f"../../deployments/deployment/{self.deployment_id}/run?parameters={values}"
            links.append(f"[{tables.markdown_text(name)}]({address})")
        return f"Measure `{reference}` again under {', '.join(links)}"


def find_evaluation_form(client: SyncPrefectClient, given: Mapping[str, Any]) -> EvaluationForm | None:
    """Return the form for a flow run's parameters, None where it is not registered; raises the API's other errors."""
    with suppress(exceptions.ObjectNotFound):
        deployment_id = client.read_deployment_by_name("evaluate-promoted/evaluate-promoted").id
        suites = tuple(sorted(Path("deployments/suites").glob("*.toml")))
        kept = {name: given[name] for name in ("store", "store_credentials") if given.get(name)}
        return EvaluationForm(deployment_id=deployment_id, kept=kept, suites=suites)
    return None


def overview_markdown(log: run_log.RunLog, curve: str, question: str = "", form: EvaluationForm | None = None) -> str:
    """Return the page: what a person is asked, how the run stands, the curve, the tables, and links."""
    status = run_status.make_status(log, beat := run_lookup.read_beat(log))
    attempted = receipts.read_receipts(log, beat)
    ended = log.state.attempts[-1].ended if log.state.attempts and not log.state.finished else None
    step, why = (ended.last_step, f": {ended.reason}") if ended else (status.step, "")
    stands = f"{'failed' if status.state == run_status.RunPhase.STOPPED else status.state}{why}"
    spent = sum(item.gpu_seconds or 0.0 for item in attempted)
    wasted = sum(item.wasted_gpu_seconds or 0.0 for item in attempted)
    document = run_lookup.configuration_document(log.state)
    price = codec.stored_value(document, "cost", "gpu_hour_price", float)
    currency = codec.stored_value(document, "cost", "currency", str)
    money = "" if price is None else format_money(spent / 3600 * price, currency or "")
    costs = (format_duration(spent), money, f"{100 * wasted / spent:.0f} % lost" if spent else "")
    said = (", ".join(filter(None, costs)), status.next)
    headline = " · ".join([f"**{stands} at {step:,}/{status.total_steps:,}**", *map(tables.markdown_text, said)])
    parts = [part for part in (f"# {tables.markdown_text(log.run_id)}", question, headline, curve) if part]
    parts.append(f"## Attempts\n\n{_narrow(tables.receipts_table(attempted[::-1]), _OF_ATTEMPTS)}")
    if touched := {reason: budget for reason, budget in status.budgets.items() if budget.spent_total}:
        parts.append(f"## Budgets\n\n{tables.markdown_table(tables.budgets_table(touched))}")
    if evaluations := list_evaluations(log.state):
        newest = evaluations[::-1][:200]
        parts.append(f"## Evaluations\n\n{_narrow(tables.evaluations_table(newest), _OF_EVALUATIONS)}")
        failed = dict.fromkeys(f"step {it.step}, {it.suite}, failed: {it.detail}" for it in newest if it.detail)
        parts += ["\n".join(f"- {tables.markdown_text(why)}" for why in failed)] if failed else []
        if older := len(evaluations) - len(newest):
            parts.append(f"and {older:,} older ones: `cairn evaluations`")
        measured = [item for item in evaluations if settings.METRIC in item.metrics]
        if form is not None and measured:
            best = min(measured, key=lambda item: item.metrics[settings.METRIC])
            parts.append(form.links(f"{log.run_id}@{best.step}"))
    attempts: dict[str, list[str]] = {}
    for attempt in log.state.attempts:
        if attempt.flow_run_id:
            attempts.setdefault(attempt.flow_run_id, []).append(str(attempt.started.attempt))
    if len(attempts) > 1:
        links = (f"- [attempt {', '.join(own)}](../../runs/flow-run/{name})" for name, own in attempts.items())
        parts.append("\n".join(("## Flow runs\n", *links)))
    return addresses.name_store("\n\n".join(parts), log.store.url, {})  # it is read on another machine


def evaluation_markdown(view: EvaluationComparison, words: str, form: EvaluationForm | None) -> str:
    """Return the page of `evaluate-promoted`: the columns of a run's page, what each row is, and all in words."""
    reference = f"{view.run_id}@{view.step}"
    table = _narrow(tables.comparison_table(view), ("", "checkpoint", *_OF_EVALUATIONS))
    parts = [f"# {tables.markdown_text(reference)}", table, tables.markdown_text(words)]
    return "\n\n".join([*parts, form.links(reference)] if form is not None else parts)


def flow_run_name(run_id: str, attempt: int) -> str:
    """Return the name of a flow run, under which those of one run stand together."""
    return f"{run_id}, attempt {attempt}" if attempt else run_id


def artifact_key(run_id: str, name: str = "") -> str:
    """Return the key of an artifact, another one for every run; Prefect allows lower case, digits and dashes."""
    plain = re.sub("[^a-z0-9]+", "-", run_id.lower()).strip("-")
    key = plain if plain == run_id else f"{plain}-{codec.sha256(run_id.encode())[:8]}"
    return "-".join(part for part in ("cairn", key, name) if part)


def _narrow(table: tables.Table, columns: Sequence[str]) -> str:
    """Return the table with these of its columns."""
    kept = [number for number, name in enumerate(table.columns) if name in columns]
    rows = tuple(tuple(row[number] for number in kept) for row in table.rows)
    return tables.markdown_table(replace(table, columns=tuple(table.columns[number] for number in kept), rows=rows))


def drawing_pause(cost_seconds: float, *, age_seconds: float, has_news: bool) -> float:
    """Return how long a plot that took `cost_seconds` stands, `age_seconds` after the flow began.

    An attempt's end since then is news, which makes the next one due sooner.
    """
    least = max(_LEAST_SECONDS, _PAUSE_PER_COST * cost_seconds)
    return least if has_news else max(least, _SHARE_OF_AGE * age_seconds)


def curve_markdown(log: run_log.RunLog, read: ReadSteps = step_log.read_step_records) -> str:
    """Return the plot, as Markdown with the PNG inside, and a line about the run; empty before the first step."""
    curves = gather_curves(log, read=read)
    if not curves.points:
        return ""
    from cairn.reports.plots.curve_plot import draw_run  # numpy and matplotlib: only where something is drawn

    image = base64.b64encode(draw_run(curves, width_px=900, height_px=600)).decode()
    return f"![curves of {curves.run_id}](data:image/png;base64,{image})\n\n{describe_run(curves)}"


class RunOverview:
    """Publishes a run's page after each change of its log, once there is a flow run; the newest state wins."""

    def __init__(self, log: run_log.RunLog, flow_run: FlowRun) -> None:
        self._log, self._flow_run = log, flow_run
        self._began = time.monotonic()
        self._told = {attempt.started.attempt for attempt in log.state.attempts if attempt.ended is not None}
        self._drawn_at, self._drawing_seconds, self._drawn_ends = -math.inf, 0.0, 0
        self._curve = self._shown = self._name = ""
        self.question = ""  # that a person is asked
        self._artifact_id: UUID | None = None
        self._lost = tuple[UUID, ...]()
        self._form: EvaluationForm | None = None
        self._samples = dict[str, step_log.StepSample]()

    @contextmanager
    def published(self) -> Iterator[None]:
        """Publish in the background while the block runs; the last state has ten seconds at the end."""
        if not self._flow_run.is_expected:
            yield
            return
        with running_beside(self._publish_all, name="overview", join_seconds=10.0):
            try:
                yield
            finally:
                self._flow_run.wanted.set()

    def _publish_all(self, stop: threading.Event) -> None:
        if (flow_run_id := self._flow_run.wait_id()) is None:
            return
        published, is_last = None, False
        with suppress(Exception), get_client(sync_client=True) as client:
            while not is_last:
                is_last = stop.wait(_TOGETHER_SECONDS)
                if is_last or published != (self._log.seq, self.question):
                    published = self._log.seq, self.question
                    with suppress(Exception):  # an API that fails costs one version of a table
                        self._publish(client, flow_run_id, is_last=is_last)

    def _publish(self, client: SyncPrefectClient, flow_run_id: UUID, *, is_last: bool) -> None:
        self._emit_ended()
        run_id = self._log.run_id
        name = flow_run_name(run_id, self._log.state.latest_attempt)
        if name != self._name and not self._flow_run.keeps_name:
            client.update_flow_run(flow_run_id, name=name)
            self._name = name
        now, ended = time.monotonic(), sum(attempt.ended is not None for attempt in self._log.state.attempts)
        age, has_news = now - self._began, ended != self._drawn_ends
        pause = drawing_pause(self._drawing_seconds, age_seconds=age, has_news=has_news)
        if (is_last or now - self._drawn_at >= pause) and (curve := curve_markdown(self._log, self._read_steps)):
            self._curve, self._drawn_at, self._drawn_ends = curve, time.monotonic(), ended
            self._drawing_seconds = self._drawn_at - now
        self._form = self._form or find_evaluation_form(client, self._flow_run.parameters)
        page = overview_markdown(self._log, self._curve, self.question, self._form)
        if page != self._shown:
            key, words = artifact_key(run_id), f"run {run_id}, after entry {self._log.seq}"
            if self._artifact_id is None:  # a flow run that was suspended has one
                given = {"flow_run_id": {"any_": [flow_run_id]}, "key": {"any_": [key]}}
                rule = filters.ArtifactFilter.model_validate(given)
                self._artifact_id = next((found.id for found in client.read_artifacts(artifact_filter=rule)), None)
            if self._artifact_id is None:
                new = ArtifactCreate(key=key, type="markdown", description=words, data=page, flow_run_id=flow_run_id)
                self._artifact_id = client.create_artifact(new).id
            else:  # a new version would be one more card
                client.update_artifact(self._artifact_id, ArtifactUpdate(data=page, description=words))
            self._shown = page
        if (lost := lost_flow_runs(self._log.state, flow_run_id)) != self._lost:
            _end_lost(client, lost, flow_run_id)
            self._lost = lost

    def _read_steps(
        self, store: object_store.ObjectStore, run_prefix: str, attempts: Sequence[run_state.AttemptRecord]
    ) -> list[step_log.StepRecord]:
        """Read on the records of the run, or of one that it was forked from, in memory that does not grow."""
        return self._samples.setdefault(run_prefix, step_log.StepSample(store, run_prefix)).read(attempts)

    def _emit_ended(self) -> None:
        """Send an event for each new receipt; its id is always the same, so that Prefect keeps one of several."""
        run_id, where_and_when = self._log.run_id, f"{self._log.store.url} {self._log.state.opening}"
        for attempt in self._log.state.attempts:
            if (ended := attempt.ended) is None or ended.attempt in self._told:
                continue
            shown_by = f"prefect.flow-run.{attempt.flow_run_id}"
            flow_run = {"prefect.resource.id": shown_by, "prefect.resource.role": "flow-run"}
            resource = {"prefect.resource.id": f"cairn.run.{run_id}", "prefect.resource.name": run_id}
            resource |= {"cairn.reason": ended.reason, "cairn.decision": ended.decision.action}
            payload = {"run": run_id, "attempt": ended.attempt, "last_step": ended.last_step, "reason": ended.reason}
            payload |= {"detail": ended.detail, "decision": asdict(ended.decision)}
            payload["device_seconds"] = {"all": ended.gpu_seconds, "wasted": ended.wasted_gpu_seconds}
            event_id = uuid5(NAMESPACE_URL, f"{where_and_when} {run_id} {ended.attempt}")
            related = [flow_run] if attempt.flow_run_id else []
            emit_event(ATTEMPT_ENDED, id=event_id, resource=resource, related=related, payload=payload)
            self._told.add(ended.attempt)


def lost_flow_runs(state: run_state.RunState, but: UUID) -> tuple[UUID, ...]:
    """Return the flow runs, newest first, whose newest attempt was lost: they are dead or fenced."""
    newest = {attempt.flow_run_id: attempt.ended for attempt in state.attempts if attempt.flow_run_id}
    lost = [UUID(name) for name, end in newest.items() if end is not None and end.reason == TerminationReason.LOST]
    return tuple(flow_run_id for flow_run_id in reversed(lost) if flow_run_id != but)[:MOST_LOST_FLOW_RUNS]


def _end_lost(client: SyncPrefectClient, lost: Sequence[UUID], flow_run_id: UUID) -> None:
    """End as `Crashed` what these flow runs have left unfinished in Prefect; raises the API's errors."""
    message = f"lost: its process is gone; flow run {flow_run_id} went on in its place"
    ending: State[Any] = states.Crashed(message=message)
    ending_segment: State[Any] = states.Crashed(name=TerminationReason.LOST.state_name, message=message)
    unfinished = {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}
    task_runs = filters.TaskRunFilter.model_validate({"flow_run_id": {"any_": list(lost)}, "state": unfinished})
    flow_runs = filters.FlowRunFilter.model_validate({"id": {"any_": list(lost)}, "state": unfinished})
    for task_run in client.read_task_runs(task_run_filter=task_runs, limit=200):
        client.set_task_run_state(task_run.id, ending_segment, force=True)
    for lost_run in client.read_flow_runs(flow_run_filter=flow_runs):
        client.set_flow_run_state(lost_run.id, ending, force=True)
