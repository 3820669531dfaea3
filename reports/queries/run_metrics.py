"""Numbers of all runs for monitoring systems, made from the store alone: asked for by Prometheus, or pushed.

Scrapes are OpenMetrics text (https://openmetrics.io). Where to and how often numbers are pushed over HTTP is said by
OpenTelemetry's own variables (https://opentelemetry.io/docs/specs/otlp/), such as `OTEL_EXPORTER_OTLP_ENDPOINT`. A run
that was over before the first scrape is only counted by its state; one that ends later keeps its numbers.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice
from typing import TYPE_CHECKING

from cairn.reports.errors import ReportError
from cairn.reports.queries import run_lookup, run_status
from cairn.storage.errors import StorageError
from cairn.storage.logs import run_index, run_log
from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.redaction import find_http_problem
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.process_scopes import repeating_beside

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData
    from prometheus_client.core import Metric

_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_OVER = (run_status.RunPhase.FINISHED, run_status.RunPhase.DELETING, run_status.RunPhase.DELETED)
_UNREADABLE = run_status.RunPhase.UNREADABLE
RUN_METRICS: dict[str, tuple[str, str]] = {
    "cairn_run_step": ("", "Newest step of the run that is known."),
    "cairn_run_total_steps": ("", "Steps that the run is configured for."),
    "cairn_run_committed_step": ("", "Step of the newest committed checkpoint."),
    "cairn_run_loss": ("", "Train loss of the newest step, in nats a token."),
    "cairn_run_held_out_loss": ("", "Held-out loss of the newest evaluation, in nats a token."),
    "cairn_run_tokens_per_second": ("", "Tokens a second since the open attempt began; 0 without one."),
    "cairn_run_heartbeat_age_seconds": ("", "Age of the open attempt's heartbeat, by the clock of the trainer's host."),
    "cairn_run_commit_age_seconds": ("", "Age of the newest commit, by the clock of its writer; since opening before."),
    "cairn_run_retries_left": ("reason", "Retries that a budget has left, by termination reason."),
    "cairn_run_attempts_total": ("reason", "Attempts that ended, by termination reason."),
    "cairn_run_device_seconds_total": ("kind", "Device time of ended attempts: useful is kept in a commit."),
    "cairn_run_open_device_seconds": ("", "Device time of the open attempt, useful or wasted once it ends."),
}
"""The metrics of a run: the label beside `run`, if there is one, and the meaning; counters end with `_total`."""
STORE_METRICS: dict[str, tuple[str, str]] = {
    "cairn_store_up": ("", "Whether the store answered this scrape."),
    "cairn_runs": ("state", "Runs of the store, by state."),
}


Samples = Mapping[str, Mapping[str, float | None]]
"""The values of a run by metric and label; None where a value is not known."""
MOST_READ_AGAIN = 400
"""Known runs that a scrape reads again: with more, each has its turn and keeps its numbers until then."""
PROMPT_SECONDS = 0.5
_AGES = ("cairn_run_heartbeat_age_seconds", "cairn_run_commit_age_seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scraped:
    """A run's state and samples, none of one that was over before the first scrape, and when they were read."""

    phase: run_status.RunPhase
    samples: Samples
    at: datetime


class RunMetrics:
    """The metrics of one store's runs; a scrape reads what moved since the one before.

    A scrape that waits for another, which began after it was asked for, takes its text. Where one takes long, the last
    one is answered while the next is made.
    """

    def __init__(self, store: ObjectStore, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._store, self._now = store, now
        self._index, self._found, self._turn = run_index.RunIndex(store), dict[str, _Scraped](), 0
        self._making, self._begun = threading.Lock(), float("-inf")
        self._text, self._took_seconds, self._beside = b"", 0.0, threading.Thread()

    def text(self) -> bytes:
        """Return one scrape as OpenMetrics text."""
        asked = time.monotonic()
        if self._took_seconds <= PROMPT_SECONDS:
            self._make(asked)
        elif not self._beside.is_alive():
            self._beside = threading.Thread(target=self._make, args=(asked,), daemon=True, name="scrape")
            self._beside.start()
        return self._text

    def _make(self, asked: float) -> None:
        """Make the text anew unless that was begun after it was asked for."""
        from prometheus_client.openmetrics.exposition import generate_latest

        with self._making:
            if self._begun <= asked:
                self._begun = time.monotonic()
                self._text = generate_latest(self)  # type: ignore[no-untyped-call]
                self._took_seconds = time.monotonic() - self._begun

    def collect(self) -> "Iterator[Metric]":
        """Yield the metrics as `prometheus_client` wants them; a store that is away leaves `cairn_store_up` 0 alone."""
        try:
            self._read()
        except StorageError:
            yield _family("cairn_store_up", [((), 0.0)])
            return
        found, now = self._found, self._now()
        older = {run_id: (now - run.at).total_seconds() for run_id, run in found.items()}
        states = Counter(run.phase for run in found.values())
        yield _family("cairn_store_up", [((), 1.0)])
        yield _family("cairn_runs", [((state,), float(count)) for state, count in sorted(states.items())])
        for name, (has_label, _) in RUN_METRICS.items():
            values = [
                ((run_id, label) if has_label else (run_id,), value + (older[run_id] if name in _AGES else 0.0))
                for run_id, run in found.items()
                for label, value in run.samples.get(name, {}).items()
                if value is not None
            ]
            yield _family(name, values)

    def _read(self) -> None:
        """Read every run that is new, and so many of the known ones that have numbers, in turn."""
        now = self._now()
        known = [run_id for run_id, run in self._found.items() if run.samples]
        turn = frozenset(islice(chain(known[self._turn :], known), MOST_READ_AGAIN))
        self._turn = (self._turn + MOST_READ_AGAIN) % max(len(known), 1) if len(known) > MOST_READ_AGAIN else 0
        kept = {run_id: self._found[run_id] for run_id in known if run_id not in turn}
        unreadable = _Scraped(phase=_UNREADABLE, samples={}, at=now)
        read = partial(self._scrape_run, now=now)
        self._found = dict(self._index.read_all(read, lambda *_: unreadable, known=kept))

    def _scrape_run(self, log: run_log.RunLog, *, now: datetime) -> _Scraped:
        phase = run_status.phase_of(log.state)
        if phase in _OVER and not (log.run_id in self._found and self._found[log.run_id].samples):
            self._index.forget(log)
            return _Scraped(phase=phase, samples={}, at=now)
        if log.head is None:
            self._index.fold(log)
        return _Scraped(phase=phase, samples=_sample_run(log, now), at=now)


def _sample_run(log: run_log.RunLog, now: datetime) -> Samples:
    """Return the values of a run that was read."""
    state, owner = log.state, log.state.open_attempt
    newest, measured = state.newest_committed, state.evaluations[-1:]
    status = run_status.make_status(log, beat := run_lookup.read_beat(log))
    ended = [record.ended for record in state.attempts if record.ended]
    tokens_per_second = 0.0
    if beat is not None and owner is not None and beat.gpu_seconds > 0:
        tokens_per_second = beat.tokens / beat.gpu_seconds * owner.started.placement.devices
    return {
        "cairn_run_step": {"": status.step},
        "cairn_run_total_steps": {"": status.total_steps},
        "cairn_run_committed_step": {"": status.newest_committed_step},
        "cairn_run_loss": {"": beat.train_loss if beat else None},
        "cairn_run_held_out_loss": {"": measured[0].metrics.get("val_loss") if measured else None},
        "cairn_run_tokens_per_second": {"": tokens_per_second},
        "cairn_run_heartbeat_age_seconds": {"": _age_seconds(now, beat.at if beat else None)},
        "cairn_run_commit_age_seconds": {"": _age_seconds(now, newest.committed_at if newest else state.opened_at)},
        "cairn_run_open_device_seconds": {"": beat.gpu_seconds if beat else None},
        "cairn_run_retries_left": {reason: budget.left for reason, budget in status.budgets.items()},
        "cairn_run_attempts_total": Counter(str(attempt.reason) for attempt in ended),
        "cairn_run_device_seconds_total": {
            "useful": sum(attempt.useful_gpu_seconds for attempt in ended),
            "wasted": sum(attempt.wasted_gpu_seconds for attempt in ended),
        },
    }


@contextmanager
def sending_metrics(store: ObjectStore, environment: Mapping[str, str], say: Callable[[str], None]) -> Iterator[None]:
    """Send from a thread while the block runs, and once more at its end; a receiver that fails is reported once.

    Raises `InvalidConfiguration` where the library is missing or the interval is not a number of milliseconds.
    """
    if find_spec("opentelemetry.exporter") is None:
        cure = "`pip install '.[otlp]'` in Cairn's folder installs it"
        raise InvalidConfiguration(f"--otlp: OpenTelemetry is not installed; {cure}")
    given = environment.get(_INTERVAL, "60000")
    if not given.isdecimal() or int(given) == 0:
        raise InvalidConfiguration(f"{_INTERVAL} is {given!r}; rule: milliseconds, at least 1; unset it for a minute")
    name = next((name for name in _ENDPOINTS if environment.get(name)), "")
    where = environment.get(name, "http://localhost:4318")
    if problem := find_http_problem(where, instead="OTEL_EXPORTER_OTLP_HEADERS"):
        raise InvalidConfiguration(f"{name}: the address {problem}")
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import MetricExportResult

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `say` reports a failure, and only once
    metrics, every_seconds, exporter, began = RunMetrics(store), int(given) / 1000, OTLPMetricExporter(), time.time_ns()

    def send(is_last: bool) -> None:
        if exporter.export(convert_scrape(metrics.collect(), began=began)) is not MetricExportResult.SUCCESS:
            raise ReportError(f"{where} takes no OTLP metrics; they are sent again every {every_seconds:g} s")

    times = {"every_seconds": every_seconds, "longest_seconds": every_seconds, "join_seconds": 10.0}
    with repeating_beside(send, lambda error: say(str(error)), name="otlp", **times):
        yield


def convert_scrape(families: "Iterable[Metric]", *, began: int) -> "MetricsData":
    """Return one scrape in OpenTelemetry's form: counters as sums since `began` (ns since 1970), the rest as gauges."""
    from opentelemetry.sdk.metrics import export
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    metrics, now = list[export.Metric](), time.time_ns()
    for family in families:
        points = [export.NumberDataPoint(it.labels, began, now, float(it.value)) for it in family.samples]
        data: export.Sum | export.Gauge = export.Gauge(points)
        if family.type == "counter":
            data = export.Sum(points, export.AggregationTemporality.CUMULATIVE, is_monotonic=True)
        metrics.append(export.Metric(name=family.name, description=family.documentation, unit="", data=data))
    scope = export.ScopeMetrics(scope=InstrumentationScope("cairn"), metrics=metrics, schema_url="")
    resource = Resource.create()  # as OpenTelemetry's variables name this service
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "cairn"}))
    return export.MetricsData([export.ResourceMetrics(resource=resource, scope_metrics=[scope], schema_url="")])


def _age_seconds(now: datetime, at: datetime | None) -> float | None:
    return None if at is None else max((now - at).total_seconds(), 0.0)


def _family(name: str, values: Sequence[tuple[tuple[str, ...], float]]) -> "Metric":
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    label, meaning = (RUN_METRICS | STORE_METRICS)[name]
    labels = [*(["run"] if name in RUN_METRICS else []), *([label] if label else [])]
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, meaning, labels=labels)
    for labelled, value in values:
        family.add_metric(labelled, value)
    return family
