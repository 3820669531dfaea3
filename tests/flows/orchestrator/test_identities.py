"""What Prefect keeps one of however many ask: the flow run that continues a run, the event of an attempt's end.

Both belong to one opening of a run in one store, and to one attempt.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from cairn.flows.orchestrator import run_overview
from cairn.flows.orchestrator.flow_run import FlowRun
from cairn.flows.watching import deployed_continuation
from cairn.flows.watching.deployed_continuation import ContinuationByDeployment
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from tests import entries

Identity = Callable[[RunLog], str]


class Client:
    """A client of an API that knows of no flow run, and makes none: as two that ask at once meet it."""

    keys: list[str]
    tags: list[set[str]]

    def __init__(self) -> None:
        self.keys, self.tags = [], []

    def read_deployment_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(id=uuid4(), concurrency_options=None)

    def read_flow_runs(self, **rules: object) -> list[object]:
        return []

    def create_flow_run_from_deployment(
        self, deployment_id: object, *, idempotency_key: str, tags: Iterable[str], **rest: object
    ) -> Any:
        self.keys.append(idempotency_key)
        self.tags.append(set(tags))
        return SimpleNamespace(id=uuid4(), state=None)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()

    @contextmanager
    def get_client(**options: object) -> Iterator[Client]:
        yield client

    monkeypatch.setattr(deployed_continuation, "get_client", get_client)
    return client


@pytest.fixture
def continuation_key(client: Client) -> Identity:
    def ask(log: RunLog) -> str:
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
            ContinuationByDeployment("train-gpt/train-gpt", log.store.url).begin(log, silent_seconds=0.0)
        return client.keys[-1]

    return ask


@pytest.fixture
def event_id(monkeypatch: pytest.MonkeyPatch) -> Identity:
    ids = list[str]()
    monkeypatch.setattr(run_overview, "emit_event", lambda name, *, id, **rest: ids.append(str(id)))

    def ask(log: RunLog) -> str:
        overview = run_overview.RunOverview(log, FlowRun())
        overview._told.clear()  # it began before the attempt ended
        overview._emit_ended()
        return ids[-1]

    return ask


@pytest.fixture(params=["continuation_key", "event_id"])
def identity(request: pytest.FixtureRequest) -> Identity:
    found: Identity = request.getfixturevalue(request.param)
    return found


def ended(folder: Path, attempts: int = 1) -> RunLog:
    """Return a run `bard` in a store there whose attempts were preempted."""
    log = RunLog(LocalStore(folder), "bard")
    log.append(lambda state: entries.opened("bard"), writer=entries.writer())
    for number in range(1, attempts + 1):
        begun, over = entries.started(number), entries.ended(number, reason="preempted")
        log.append(lambda state, body=begun: body, writer=entries.writer())  # type: ignore[misc]
        log.append(lambda state, body=over: body, writer=entries.writer(number))  # type: ignore[misc]
    return log


def read_again(log: RunLog) -> RunLog:
    other = RunLog(log.store, log.run_id)
    other.refresh()
    return other


def test_whoever_asks_asks_for_the_same(identity: Identity, tmp_path: Path) -> None:
    log = ended(tmp_path)
    assert identity(log) == identity(read_again(log))


def test_each_attempt_has_its_own(identity: Identity, tmp_path: Path) -> None:
    log = ended(tmp_path)
    first = identity(log)
    log.append(lambda state: entries.started(2), writer=entries.writer())
    log.append(lambda state: entries.ended(2, reason="preempted"), writer=entries.writer(2))
    assert identity(log) != first


def test_a_run_of_the_same_name_in_another_store_has_another(identity: Identity, tmp_path: Path) -> None:
    assert identity(ended(tmp_path / "one")) != identity(ended(tmp_path / "two"))


def test_a_run_that_is_opened_anew_in_an_emptied_store_has_another(identity: Identity, tmp_path: Path) -> None:
    first = identity(ended(tmp_path / "store"))
    (tmp_path / "store").rename(tmp_path / "before")
    assert identity(ended(tmp_path / "store")) != first


def test_the_flow_run_that_continues_a_run_has_its_tag_before_the_one_it_follows(
    continuation_key: Identity, client: Client, tmp_path: Path
) -> None:
    continuation_key(ended(tmp_path))
    assert client.tags == [{"run:bard"}]
