"""Our own HTTP clients: credentials go only to the server that was named, and an answer cannot fill memory."""

from collections.abc import Callable
from contextlib import suppress

import pytest

from cairn.operations.checks import _prefect
from cairn.reports.errors import ReportError
from cairn.reports.exporters.tracking_tools import MlflowExporter
from cairn.tasks.attempt.preemption_notice import MetadataUnavailable, read_aws_notice, read_gcp_notice
from tests.security.recording_server import recording_server

CANARY = "canary-of-a-client"
FLOOD_BYTES = 128 * 1024 * 1024


def ask_mlflow(url: str) -> None:
    with suppress(ReportError):
        MlflowExporter(url, {"MLFLOW_TRACKING_TOKEN": CANARY}, "bard").ask("runs/create")


def ask_prefect(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_API_URL", f"{url}/api")
        patch.setenv("PREFECT_API_KEY", CANARY)
        with suppress(OSError):  # it is no Prefect server
            _prefect()


def ask_aws(url: str) -> None:
    with suppress(MetadataUnavailable):
        read_aws_notice(url)


def ask_google(url: str) -> None:
    with suppress(MetadataUnavailable):
        read_gcp_notice(url.removeprefix("http://"))


ASKING = [ask_mlflow, ask_prefect, ask_aws, ask_google]


@pytest.mark.parametrize("ask", ASKING)
def test_no_redirect_is_followed(ask: Callable[[str], None]) -> None:
    with recording_server() as elsewhere, recording_server(redirect_to=elsewhere.url) as named:
        ask(named.url)
    assert named.requests and elsewhere.requests == []


def test_a_redirect_of_the_tracking_server_is_said() -> None:
    with recording_server(redirect_to="http://127.0.0.1:9") as named, pytest.raises(ReportError, match="HTTP 302"):
        MlflowExporter(named.url, {}, "bard").ask("experiments/get-by-name", {"experiment_name": "cairn"})


@pytest.mark.parametrize("ask", ASKING)
def test_an_answer_is_read_up_to_a_limit(ask: Callable[[str], None]) -> None:
    with recording_server(flood_bytes=FLOOD_BYTES) as named:
        ask(named.url)
    assert named.requests and named.sent_bytes < FLOOD_BYTES // 2, "the rest is what buffers took"


def test_a_tracking_server_that_answers_too_much_is_refused() -> None:
    with (
        recording_server(flood_bytes=FLOOD_BYTES) as named,
        pytest.raises(ReportError, match="more than 8,388,608 bytes"),
    ):
        MlflowExporter(named.url, {}, "bard").ask("runs/search")
