"""The numbers of runs for monitoring: scraped, or sent by OTLP."""

import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import yaml
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cairn.reports.queries import run_metrics
from cairn.reports.queries.run_metrics import RUN_METRICS, STORE_METRICS, RunMetrics, sending_metrics
from cairn.storage.errors import StoreUnavailable
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.errors import InvalidConfiguration
from tests.entries import NOON
from tests.fabricated_run import FabricatedRun, fabricate
from tests.loopback import serving
from tests.memory_store import MemoryStore
from tests.processes.waiting import patience_seconds

ALERTS = Path("deployments/alerts.yaml")


def scraped(text: bytes, **labels: str) -> Mapping[str, float]:
    families = text_string_to_metric_families(text.decode())
    return {sample.name: sample.value for family in families for sample in family.samples if sample.labels == labels}


def scrape(store: LocalStore, **labels: str) -> Mapping[str, float]:
    return scraped(RunMetrics(store, now=lambda: NOON + timedelta(hours=1)).text(), **labels)


def test_the_step_is_that_of_the_heartbeat(bard: FabricatedRun, store: LocalStore) -> None:
    assert scrape(store, run="bard")["cairn_run_step"] == 33


def test_every_metric_of_a_running_run_is_there(bard: FabricatedRun, store: LocalStore) -> None:
    families = text_string_to_metric_families(RunMetrics(store).text().decode())
    assert {family.name for family in families} == {
        name.removesuffix("_total") for name in {**RUN_METRICS, **STORE_METRICS}
    }


def test_attempts_that_ended_and_retries_left_stand_by_reason(fresh: FabricatedRun, store: LocalStore) -> None:
    for _ in range(2):
        fresh.start()
        fresh.end("lost", action="resume", charged="lost")
    found = scrape(store, run="fresh", reason="lost")
    assert (found["cairn_run_attempts_total"], found["cairn_run_retries_left"]) == (2, 18)


def test_device_time_is_useful_or_wasted(fresh: FabricatedRun, store: LocalStore) -> None:
    fresh.start()
    fresh.end("lost", action="resume", charged="lost", useful_gpu_seconds=2.5, wasted_gpu_seconds=1.5)
    kinds = {kind: scrape(store, run="fresh", kind=kind) for kind in ("useful", "wasted")}
    assert [kinds[kind]["cairn_run_device_seconds_total"] for kind in kinds] == [2.5, 1.5]


def test_a_scrape_sees_what_happened_since_the_one_before(fresh: FabricatedRun, store: LocalStore) -> None:
    metrics = RunMetrics(store)
    fresh.start()
    before = scraped(metrics.text(), run="fresh").get("cairn_run_committed_step")
    fresh.commit(10)
    assert (before, scraped(metrics.text(), run="fresh")["cairn_run_committed_step"]) == (None, 10)


def test_of_many_runs_a_scrape_reads_some_in_turn_and_the_others_grow_older(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_metrics, "MOST_READ_AGAIN", 2)
    runs, hour = [fabricate(store, f"run-{number}") for number in range(5)], 1
    metrics = RunMetrics(store, now=lambda: NOON + timedelta(hours=hour))
    for run in runs:
        run.start()
    before = scraped(metrics.text(), run="run-4")
    for run in runs:
        run.commit(20)
    seen = list[list[float]]()
    for hour in (2, 3, 4):  # noqa: B007 (read by the clock)
        text = metrics.text()
        seen.append([scraped(text, run=run.log.run_id).get("cairn_run_committed_step", 0.0) for run in runs])
    assert seen == [[20, 20, 0, 0, 0], [20, 20, 20, 20, 0], [20] * 5]
    monkeypatch.setattr(run_metrics, "MOST_READ_AGAIN", 0)
    hour = 10
    after = scraped(metrics.text(), run="run-4")
    assert after["cairn_run_commit_age_seconds"] > before["cairn_run_commit_age_seconds"]


def test_scrapes_that_were_asked_for_before_one_began_share_it(
    bard: FabricatedRun, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, reads, asked = RunMetrics(store), list[int](), threading.Barrier(20)
    make, read = metrics._make, metrics._read

    def make_once_all_have_asked(at: float) -> None:
        asked.wait()
        make(at)

    monkeypatch.setattr(metrics, "_make", make_once_all_have_asked)
    monkeypatch.setattr(metrics, "_read", lambda: reads.append(1) or read())
    with ThreadPoolExecutor(20) as pool:
        texts = [scrape.result() for scrape in [pool.submit(metrics.text) for _ in range(20)]]
    assert len(reads) == 1 and len(set(texts)) == 1


def test_where_a_scrape_takes_long_the_last_one_is_answered_while_the_next_is_made(
    fresh: FabricatedRun, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_metrics, "PROMPT_SECONDS", 0.0)
    metrics = RunMetrics(store)
    fresh.start()
    first = scraped(metrics.text(), run="fresh")
    fresh.commit(20)
    with metrics._making:  # the next one is not made before it is asked what is answered
        assert scraped(metrics.text(), run="fresh") == first
    metrics._beside.join()
    assert scraped(metrics.text(), run="fresh")["cairn_run_committed_step"] == 20


def test_a_run_that_was_over_before_is_only_counted(fresh: FabricatedRun, store: LocalStore) -> None:
    fresh.start()
    fresh.complete()
    assert (scrape(store, state="finished"), scrape(store, run="fresh")) == ({"cairn_runs": 1}, {})


def test_a_run_that_ends_while_it_is_observed_keeps_its_numbers(fresh: FabricatedRun, store: LocalStore) -> None:
    metrics = RunMetrics(store)
    fresh.start()
    metrics.text()
    fresh.complete()
    assert scraped(metrics.text(), run="fresh")["cairn_run_step"] == 40


@pytest.mark.unsound_log
def test_a_log_that_does_not_verify_hides_no_other_run(bard: FabricatedRun, store: LocalStore) -> None:
    store.create("runs/broken/log/9999999999.json", b"not an entry")
    assert "cairn_run_step" in scrape(store, run="bard")


class AwayStore(MemoryStore):
    is_away = True

    def folders(self, prefix: str) -> list[str]:
        if self.is_away:
            raise StoreUnavailable("no answer")
        return super().folders(prefix)


def test_a_store_that_comes_back_is_up_again() -> None:
    store = AwayStore()
    metrics = RunMetrics(store)
    away = scraped(metrics.text())
    store.is_away = False
    assert (away, scraped(metrics.text())) == ({"cairn_store_up": 0}, {"cairn_store_up": 1})


def alert_rules() -> list[Mapping[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_asks_for_metrics_that_exist(rule: Mapping[str, Any]) -> None:
    named = set(re.findall(r"cairn_\w+", rule["expr"]))
    assert named and named <= {*RUN_METRICS, *STORE_METRICS}


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
