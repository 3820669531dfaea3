"""Addresses that may hold secrets: written wrongly, or repeated by a library, they are shown without them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cairn.flows.orchestrator.prefect_settings import server_address
from cairn.reports.errors import ReportError
from cairn.reports.notices.notice import CommandReceiver, Notice, NoticeKind, WebhookReceiver, delivering_notices
from cairn.reports.queries.run_metrics import sending_metrics
from cairn.storage.errors import StorageError
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.open_store import open_store
from cairn.storage.stores.s3_bucket import convert_error
from cairn.tasks.configuration.configuration_source import read_configuration, read_notify
from cairn.tasks.errors import InvalidConfiguration
from tests.processes.waiting import wait_until

NOTICE = Notice(run_id="bard", key="k", kind=NoticeKind.FINISHED, step=1, at=None, text="done")
WRONG = {
    "a space": "http://127.0.0.1:9/hidden word",
    "a space in the host": "http://127.0.0.1 :9/hidden",
    "a line": "http://127.0.0.1:9/hidden\nX: y",
    "a tab": "http://127.0.0.1:9/hid\tden",
    "a port that is none": "http://127.0.0.1:hidden/x",
    "a port that is too large": "http://127.0.0.1:99999/hidden",
    "a password": "http://ada:hidden@127.0.0.1:9/",
    "a user": "http://hidden@127.0.0.1:9/",
    "a password and a bad port": "http://ada:hidden@127.0.0.1:x/",
    "half a bracket": "http://[hidden/x",
    "one slash": "http:/ada:hidden@127.0.0.1/",
    "no slash": "http:ada:hidden@127.0.0.1/",
    "no host": "http:///hidden",
    "no scheme": "ada:hidden@127.0.0.1:9/",
    "a letter that is none of ASCII": "http://127.0.0.1:9/hidden-\u00fc",
}


def notify(address: str) -> None:
    read_notify({"CAIRN_NOTIFY__WEBHOOK": address})


def webhook(address: str) -> None:
    settings = ["data.sources=a.txt", "training.steps=1"]
    read_configuration("", overrides=settings, environment={"CAIRN_NOTIFY__WEBHOOK": address})


def mlflow(address: str) -> None:
    settings = ["data.sources=a.txt", "training.steps=1"]
    read_configuration("", overrides=settings, environment={"CAIRN_EXPORTERS__MLFLOW": address})


def prefect(address: str) -> None:
    server_address({"PREFECT_API_URL": address})


def otlp(address: str) -> None:
    with sending_metrics(LocalStore(Path("nowhere")), {"OTEL_EXPORTER_OTLP_ENDPOINT": address}, print):
        pass


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("give", [notify, webhook, mlflow, prefect, otlp])
def test_a_wrong_address_is_refused_and_not_repeated(give: Callable[[str], None], name: str) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        give(WRONG[name])
    assert "hidden" not in str(refused.value) and "address" in str(refused.value)


@pytest.mark.parametrize("url", ["s3:/key:hidden@bucket", "http:/ada:hidden@host/x"])
def test_an_address_of_a_store_or_a_configuration_with_too_few_slashes_is_not_repeated(url: str) -> None:
    for give in (open_store, lambda text: read_configuration(text, overrides=(), environment={})):
        with pytest.raises((StorageError, InvalidConfiguration)) as refused:
            give(url)
        assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("name", sorted(WRONG.keys() - {"no scheme"}))
def test_a_webhook_that_fails_all_the_same_does_not_repeat_it(name: str) -> None:
    with pytest.raises(ReportError) as failed:
        WebhookReceiver(WRONG[name], 1.0).receive(NOTICE)
    assert "hidden" not in str(failed.value) and "hid" not in str(failed.value).split()


@pytest.mark.parametrize("command", ["sleep 60 hidden", "/nowhere hidden", "sh -c 'exit 1' hidden"])
def test_a_command_that_fails_is_not_repeated(command: str, tmp_path: Path) -> None:
    said, receiver = list[str](), CommandReceiver(command, 0.1)
    with delivering_notices(LocalStore(tmp_path), [receiver], lambda: [NOTICE], said.append, every_seconds=0.01):
        wait_until(lambda: bool(said), "the line")
    assert "hidden" not in " ".join(said)


SAID = [
    "cannot reach https://somebody:canary@host/bucket",
    "https://host/b/k?X-Amz-Algorithm=AWS4&X-Amz-Signature=canary&X-Amz-Expires=9",
    "https://host/b/k?X-Amz-Credential=canary%2F2026&versionId=1",
    "https://host/b/k?x-amz-security-token=canary",
    "'https://host/b/k?AWSAccessKeyId=canary&Signature=canary%3D&Expires=9'",
]


@pytest.mark.parametrize("said", SAID)
def test_an_error_of_a_store_repeats_no_credentials(said: str) -> None:
    shown = str(convert_error(OSError(said), action="read", where="s3://bucket/key"))
    assert "canary" not in shown and "host" in shown
