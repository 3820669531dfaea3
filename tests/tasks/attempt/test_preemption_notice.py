"""A real HTTP server that answers as the clouds' metadata services do, and the notices that come of it."""

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cairn.tasks.attempt.preemption_notice import (
    MetadataUnavailable,
    NoticeSource,
    PreemptionNotice,
    notice_sources,
    polling_notices,
    read_aws_notice,
    read_azure_notice,
    read_gcp_notice,
    read_notice_file,
)
from cairn.tasks.attempt.shutdown_signal import ShutdownSignal
from cairn.tasks.configuration.settings import PreemptionConfig
from tests.tasks.metadata_service import ACTION, AZURE_EVENTS, AZURE_NAME, GOOGLE, QUIET, TERMINATE, Cloud, served

REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def host(cloud: Cloud) -> Iterator[str]:
    with served(cloud) as address:
        yield address


@pytest.fixture
def aws(host: str) -> NoticeSource:
    return partial(read_aws_notice, f"http://{host}/")


@pytest.fixture
def gcp(host: str, cloud: Cloud) -> NoticeSource:
    cloud.answers |= QUIET
    return partial(read_gcp_notice, host)


@pytest.fixture
def azure(host: str, cloud: Cloud) -> NoticeSource:
    cloud.answers |= {AZURE_EVENTS: '{"DocumentIncarnation": 1, "Events": []}', AZURE_NAME: "vm_0"}
    return partial(read_azure_notice, f"http://{host}/")


def azure_event(kind: str, *machines: str) -> str:
    event = {"EventId": "1", "EventType": kind, "Resources": machines, "NotBefore": "Mon, 19 Sep 2026 18:29:47 GMT"}
    return json.dumps({"DocumentIncarnation": 2, "Events": [event]})


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Redeploy", "Reboot"])
def test_an_event_that_ends_this_machine_of_azure_is_a_notice(azure: NoticeSource, cloud: Cloud, kind: str) -> None:
    cloud.answers[AZURE_EVENTS] = azure_event(kind, "vm_1", "vm_0")
    detail = f"Azure announced: {kind} at Mon, 19 Sep 2026 18:29:47 GMT"
    assert azure() == PreemptionNotice(name="azure", detail=detail)


@pytest.mark.parametrize(("kind", "machine"), [("Freeze", "vm_0"), ("Preempt", "vm_1"), ("Preempt", "vm_00")])
def test_an_event_of_another_machine_or_a_freeze_is_no_notice(
    azure: NoticeSource, cloud: Cloud, kind: str, machine: str
) -> None:
    cloud.answers[AZURE_EVENTS] = azure_event(kind, machine)
    assert azure() is None


def test_a_spot_instance_that_may_stay_has_no_notice(aws: NoticeSource) -> None:
    assert aws() is None


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_an_instance_action_is_a_notice(aws: NoticeSource, cloud: Cloud, action: str) -> None:
    cloud.answers[ACTION] = TERMINATE.replace("terminate", action)
    assert aws() == PreemptionNotice(name="aws", detail=f"AWS announced: {action} at 2026-01-01T12:02:00Z")


def test_a_rebalance_recommendation_is_no_notice(aws: NoticeSource, cloud: Cloud) -> None:
    cloud.answers[REBALANCE] = '{"noticeTime": "2026-01-01T12:00:00Z"}'
    assert aws() is None
    assert not any("rebalance" in asked for asked in cloud.asked)


def test_each_question_has_its_own_token(aws: NoticeSource, cloud: Cloud) -> None:
    aws()
    cloud.token, cloud.answers[ACTION] = "token-2", TERMINATE
    assert aws() is not None
    assert cloud.asked == ["PUT /latest/api/token", f"GET {ACTION}"] * 2


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("preempted", "TRUE\n", "this instance is being preempted"),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"),
    ],
)
def test_an_instance_that_google_takes_has_a_notice(
    gcp: NoticeSource, cloud: Cloud, path: str, answer: str, said: str
) -> None:
    cloud.answers[f"{GOOGLE}/{path}"] = answer
    assert gcp() == PreemptionNotice(name="gcp", detail=f"GCP announced: {said}")


@pytest.mark.parametrize("event", ["NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE"])
def test_maintenance_the_instance_survives_is_no_notice(gcp: NoticeSource, cloud: Cloud, event: str) -> None:
    cloud.answers[f"{GOOGLE}/maintenance-event"] = event
    assert gcp() is None


def test_who_does_not_say_it_is_google_is_not_believed(gcp: NoticeSource, cloud: Cloud) -> None:
    cloud.answers[f"{GOOGLE}/preempted"], cloud.is_google = "TRUE", False
    with pytest.raises(MetadataUnavailable):
        gcp()


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        *(("aws", ACTION, body) for body in ("", "<html>sign in</html>", '{"time": "now"}', "[]", '{"action": 7}')),
        *(("azure", AZURE_EVENTS, body) for body in ("", "<html>", "[]", '{"Events": [{}]}', '{"Events": "none"}')),
    ],
)
def test_an_answer_that_makes_no_sense_is_no_notice(
    request: pytest.FixtureRequest, cloud: Cloud, name: str, path: str, body: str
) -> None:
    source: NoticeSource = request.getfixturevalue(name)
    cloud.answers[path] = body
    with pytest.raises(MetadataUnavailable):
        source()


@pytest.mark.parametrize("status", [400, 401, 403, 429, 500, 503])
@pytest.mark.parametrize("name", ["aws", "azure", "gcp"])
def test_a_service_in_trouble_is_no_notice(
    request: pytest.FixtureRequest, cloud: Cloud, name: str, status: int
) -> None:
    source: Callable[[], PreemptionNotice | None] = request.getfixturevalue(name)
    cloud.status = status
    with pytest.raises(MetadataUnavailable):
        source()


def test_a_service_that_is_not_there_is_no_notice(unused_port: int) -> None:
    for source in (
        partial(read_aws_notice, f"http://127.0.0.1:{unused_port}"),
        partial(read_azure_notice, f"http://127.0.0.1:{unused_port}"),
        partial(read_gcp_notice, f"127.0.0.1:{unused_port}"),
    ):
        with pytest.raises(MetadataUnavailable):
            source()


def test_a_file_is_a_notice_as_soon_as_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    source = partial(read_notice_file, str(path))
    assert source() is None
    path.touch()
    assert source() == PreemptionNotice(name="notice-file", detail=f"notice file {path} appeared")
    path.write_text("maintenance at noon\nmore\n")
    assert source() == PreemptionNotice(name="notice-file", detail=f"notice file {path} appeared: maintenance at noon")


def test_the_configuration_names_the_sources(host: str, cloud: Cloud, tmp_path: Path) -> None:
    environment = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{host}", "GCE_METADATA_HOST": host}
    cloud.answers |= QUIET | {ACTION: TERMINATE, f"{GOOGLE}/preempted": "TRUE"}
    (tmp_path / "leave").touch()
    assert notice_sources(PreemptionConfig(), environment) == ()
    config = PreemptionConfig(notice_file=str(tmp_path / "leave"), metadata="aws")
    assert [found and found.name for found in (ask() for ask in notice_sources(config, environment))] == [
        "notice-file",
        "aws",
    ]
    cloud.answers |= {AZURE_EVENTS: azure_event("Preempt", "vm_0"), AZURE_NAME: "vm_0"}
    elsewhere = {"AZURE_POD_IDENTITY_AUTHORITY_HOST": f"http://{host}"}
    (azure,) = notice_sources(PreemptionConfig(metadata="azure"), elsewhere)
    assert (found := azure()) is not None and found.name == "azure"
    (gcp,) = notice_sources(PreemptionConfig(metadata="gcp"), environment)
    assert gcp() == PreemptionNotice(name="gcp", detail="GCP announced: this instance is being preempted")


def test_a_notice_reaches_the_listeners_once_and_keeps_its_words(aws: NoticeSource, cloud: Cloud) -> None:
    notice, heard = ShutdownSignal(), list[str]()
    told = threading.Event()

    def listen() -> None:
        heard.append(notice.detail)
        told.set()

    with notice.on_shutdown(listen), polling_notices(notice, (aws,), poll_seconds=0.001, on_problem=pytest.fail):
        cloud.answers[ACTION] = TERMINATE
        assert told.wait(240)
    assert heard == ["AWS announced: terminate at 2026-01-01T12:02:00Z"]
    assert notice.signal == "aws"


def test_silent_services_are_asked_again_and_complained_of_once(aws: NoticeSource, cloud: Cloud) -> None:
    notice, problems = ShutdownSignal(), list[str]()
    cloud.status = 500
    with polling_notices(notice, (aws,), poll_seconds=0.001, on_problem=problems.append):
        assert cloud.asked_enough.wait(240)
    assert problems == ["AWS metadata service answered 500; no notice comes from there until it answers"]
    assert notice.signal is None


def test_without_sources_there_is_no_thread() -> None:
    with polling_notices(ShutdownSignal(), (), poll_seconds=0.001, on_problem=pytest.fail):
        assert "preemption" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def unused_port() -> int:
    """A port nobody listens on."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return server.server_address[1]
