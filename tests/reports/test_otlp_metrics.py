from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from queue import SimpleQueue
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from cairn.reports.queries.run_metrics import RUN_METRICS, STORE_METRICS, sending_metrics
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.errors import InvalidConfiguration
from tests.fabricated_run import FabricatedRun
from tests.loopback import serving
from tests.processes.waiting import patience_seconds


class Collector:
    """An OTLP receiver on the loopback: what it was sent, decoded, and the status of the next answers."""

    def __init__(self) -> None:
        self.url, self.status = "", 200
        self.received = SimpleQueue[Any]()

    def next(self) -> Any:
        """Wait for a request, and return its one resource."""
        (resource,) = self.received.get(timeout=patience_seconds()).resource_metrics
        return resource

    def metrics(self) -> Mapping[str, Any]:
        """Wait for a request, and return its metrics by name."""
        return {metric.name: metric for metric in self.next().scope_metrics[0].metrics}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            collector.received.put(ExportMetricsServiceRequest.FromString(content))
            self.send_response(collector.status)
            self.end_headers()

    with serving(Handler) as collector.url:
        yield collector


@pytest.fixture
def environment(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """The variables of OpenTelemetry that name the receiver."""
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_METRIC_EXPORT_INTERVAL": "50"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


def test_every_metric_of_a_running_run_is_sent(
    bard: FabricatedRun, store: LocalStore, collector: Collector, environment: Mapping[str, str]
) -> None:
    with sending_metrics(store, environment, print):
        sent = collector.metrics()
    assert sent.keys() == {name.removesuffix("_total") for name in {**RUN_METRICS, **STORE_METRICS}}
    (step,) = sent["cairn_run_step"].gauge.data_points
    assert step.as_double == 33 and step.attributes[0].value.string_value == "bard"


def test_what_only_grows_is_sent_as_a_sum_since_the_sender_began(
    fresh: FabricatedRun, store: LocalStore, collector: Collector, environment: Mapping[str, str]
) -> None:
    fresh.start()
    fresh.end("lost", action="resume", charged="lost")
    with sending_metrics(store, environment, print):
        ended = collector.metrics()["cairn_run_attempts"].sum
    assert ended.is_monotonic and ended.data_points[0].as_double == 1
    assert ended.data_points[0].start_time_unix_nano <= ended.data_points[0].time_unix_nano


def test_a_later_request_says_what_happened_since(
    fresh: FabricatedRun, store: LocalStore, collector: Collector, environment: Mapping[str, str]
) -> None:
    with sending_metrics(store, environment, print):
        collector.next()
        fresh.start()
        fresh.commit(10)
    while not collector.received.empty():
        last = collector.metrics()
    assert last["cairn_run_committed_step"].gauge.data_points[0].as_double == 10


def test_a_receiver_that_refuses_is_reported_once_and_sent_to_again(
    bard: FabricatedRun, store: LocalStore, collector: Collector, environment: Mapping[str, str]
) -> None:
    said: list[str] = []
    collector.status = 400
    with sending_metrics(store, environment, said.append):
        for _ in range(3):
            collector.next()
    assert said == [f"{collector.url} takes no OTLP metrics; they are sent again every 0.05 s"]


@pytest.mark.parametrize(("name", "expected"), [("", "cairn"), ("night shift", "night shift")])
def test_the_service_is_cairn_unless_a_variable_names_it(
    store: LocalStore,
    collector: Collector,
    environment: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    expected: str,
) -> None:
    if name:
        monkeypatch.setenv("OTEL_SERVICE_NAME", name)
    with sending_metrics(store, environment, print):
        attributes = {pair.key: pair.value.string_value for pair in collector.next().resource.attributes}
    assert attributes["service.name"] == expected


@pytest.mark.parametrize("milliseconds", ["0", "-5", "a minute"])
def test_an_interval_that_is_none_is_refused_by_name(store: LocalStore, milliseconds: str) -> None:
    with (
        pytest.raises(InvalidConfiguration, match="OTEL_METRIC_EXPORT_INTERVAL is"),
        sending_metrics(store, {"OTEL_METRIC_EXPORT_INTERVAL": milliseconds}, print),
    ):
        pass
