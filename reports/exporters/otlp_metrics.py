"""The numbers of all runs, pushed by OpenTelemetry's protocol (https://opentelemetry.io/docs/specs/otlp/) over HTTP.

Where to and how often is said by OpenTelemetry's own variables of this machine, such as `OTEL_EXPORTER_OTLP_ENDPOINT`
and `OTEL_METRIC_EXPORT_INTERVAL`. The numbers are those that Prometheus would scrape.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cairn.reports.errors import ReportError
from cairn.reports.queries.run_metrics import RunMetrics
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.process_scopes import repeating_beside

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData
    from prometheus_client.core import Metric

_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@contextmanager
def sending_metrics(store: ObjectStore, environment: Mapping[str, str], say: Callable[[str], None]) -> Iterator[None]:
    """Send from a thread while the block runs, and once more at its end; a receiver that fails is reported once.

    Raises `InvalidConfiguration` where the library is missing or the interval is not a number of milliseconds.
    """
    if find_spec("opentelemetry.exporter") is None:
        raise InvalidConfiguration(
            "--otlp: OpenTelemetry is not installed; `pip install 'cairn-train[otlp]'` installs it"
        )
    given = environment.get(_INTERVAL, "60000")
    if not given.isdecimal() or int(given) == 0:
        raise InvalidConfiguration(f"{_INTERVAL} is {given!r}; rule: milliseconds, at least 1; unset it for a minute")
    where = next((environment[name] for name in _ENDPOINTS if environment.get(name)), "http://localhost:4318")
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
        points = [
            export.NumberDataPoint(
                attributes=sample.labels, start_time_unix_nano=began, time_unix_nano=now, value=float(sample.value)
            )
            for sample in family.samples
        ]
        data: export.Sum | export.Gauge = export.Gauge(points)
        if family.type == "counter":
            data = export.Sum(points, export.AggregationTemporality.CUMULATIVE, is_monotonic=True)
        metrics.append(export.Metric(name=family.name, description=family.documentation, unit="", data=data))
    scope = export.ScopeMetrics(scope=InstrumentationScope("cairn"), metrics=metrics, schema_url="")
    resource = Resource.create()  # as OpenTelemetry's variables name this service
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "cairn"}))
    return export.MetricsData([export.ResourceMetrics(resource=resource, scope_metrics=[scope], schema_url="")])
