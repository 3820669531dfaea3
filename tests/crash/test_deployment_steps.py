"""What a deployed flow run asks of a real Prefect server, in this process: its successor and its place; the set-up."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from cairn.flows.orchestrator import server_setup
from cairn.flows.orchestrator.server_setup import ACCELERATORS, QUEUES, StoreCredentials, accelerator_slot, set_up
from cairn.flows.watching.deployed_continuation import name_successor
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.policy.termination import FlowEnd, FlowOutcome
from tests.crash.deployed_run import successors
from tests.processes.waiting import wait_until

pytestmark = pytest.mark.xdist_group("deployment-steps")  # its limit and its block type are the whole server's
PREEMPTED = FlowEnd(reason=FlowOutcome.PREEMPTED, message="SIGTERM; the same command continues")


def test_a_preempted_flow_run_names_its_successor_which_begins_when_the_back_off_is_over(
    client: SyncPrefectClient, flow_run: FlowRun, log: RunLog
) -> None:
    before = datetime.now(UTC)
    end = name_successor(PREEMPTED, log, print)
    after = datetime.now(UTC)
    (successor,) = successors(client, flow_run)
    assert f"; next: flow run {successor.id} of " in end.message
    assert successor.expected_start_time is not None
    assert before <= successor.expected_start_time - timedelta(minutes=5) <= after


def test_a_successor_has_name_tags_and_job_variables_of_its_run(
    client: SyncPrefectClient, flow_run: FlowRun, log: RunLog
) -> None:
    name_successor(PREEMPTED, log, print)
    (successor,) = successors(client, flow_run)
    assert successor.name == f"{log.run_id}, attempt 2"
    assert (sorted(successor.tags), successor.job_variables) == (["mine", f"run:{log.run_id}"], {"spot": True})


def test_a_second_one_is_not_made(client: SyncPrefectClient, flow_run: FlowRun, log: RunLog) -> None:
    name_successor(PREEMPTED, log, print)
    again = name_successor(PREEMPTED, log, print)
    assert len(successors(client, flow_run)) == 1
    assert f"; next: flow run {log.run_id}, attempt 2 is continuing it" in again.message


def test_what_is_not_preempted_has_no_successor(client: SyncPrefectClient, flow_run: FlowRun, log: RunLog) -> None:
    end = FlowEnd(reason=FlowOutcome.BUDGET_EXHAUSTED, message="why")
    assert (name_successor(end, log, print), successors(client, flow_run)) == (end, [])


@pytest.mark.usefixtures("flow_run")
def test_without_an_answer_of_the_api_the_end_stays_as_it_was_and_one_line_says_what_failed(log: RunLog) -> None:
    said: list[str] = []
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert name_successor(PREEMPTED, log, said.append) == PREEMPTED
    (line,) = said
    assert line.startswith("no flow run was made that continues the run: ") and "\n" not in line
    assert "onnect" in line  # in the words of the client


@pytest.fixture
def one_place(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A limit of one flow run, on a server that may be slow to answer."""
    monkeypatch.setattr(server_setup, "_ANSWER_SECONDS", 120.0)
    pool = WorkPoolCreate(name=f"pool-{uuid4().hex[:8]}", type="process")
    run_set_up(pool, accelerators=1)
    yield
    client.delete_global_concurrency_limit_by_name(ACCELERATORS)


def run_set_up(pool: WorkPoolCreate, *, accelerators: int | None = None, alert_block: str = "") -> list[str]:
    return list(asyncio.run(set_up(pool, accelerators=accelerators, alert_block=alert_block)))


@pytest.mark.usefixtures("one_place", "flow_run")
def test_a_flow_run_waits_for_a_place_until_another_leaves() -> None:
    said, is_in = list[str](), threading.Event()

    def second() -> None:
        with accelerator_slot(said.append):
            is_in.set()

    with accelerator_slot(said.append):
        waiting = _beside(second)
        wait_until(lambda: bool(said), "the second one's waiting")
        assert not is_in.is_set()
    waiting.join()
    assert is_in.is_set() and len(said) == 1


@pytest.mark.usefixtures("one_place", "flow_run")
def test_a_flow_run_that_gets_no_place_goes_on_all_the_same() -> None:
    said = list[str]()
    with accelerator_slot(said.append), accelerator_slot(said.append, most_seconds=0.0):
        assert [line.rpartition(": ")[2] for line in said] == ["waits for one, at most 0 s", "goes on all the same"]


@pytest.mark.usefixtures("flow_run")
def test_without_an_answer_of_the_api_nobody_waits_for_a_place() -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}), accelerator_slot(pytest.fail):
        pass


def test_setting_a_server_up_twice_changes_nothing(client: SyncPrefectClient) -> None:
    pool = WorkPoolCreate(name=f"pool-{uuid4().hex[:8]}", type="process")
    first = run_set_up(pool)
    assert f"work pool {pool.name}: made" in first
    assert run_set_up(pool) == []
    response = client.request("POST", f"/work_pools/{pool.name}/queues/filter", json={})
    assert {item["name"]: item["priority"] for item in response.json()} == QUEUES


@pytest.mark.usefixtures("client")
def test_two_that_set_a_server_up_at_once_both_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def both() -> None:
        pools = [WorkPoolCreate(name=f"pool-{uuid4().hex[:8]}", type="process") for _ in range(2)]
        await asyncio.gather(*(set_up(pool, accelerators=None, alert_block="") for pool in pools))

    monkeypatch.setattr(StoreCredentials, "_block_type_slug", f"new-{uuid4().hex[:8]}")
    monkeypatch.setattr(StoreCredentials, "_block_type_name", f"new {uuid4().hex[:8]}")
    asyncio.run(both())


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("block", ["slack-webhook/nobody", "mine"])
def test_a_block_that_is_not_there_is_refused_by_name(block: str) -> None:
    pool = WorkPoolCreate(name=f"pool-{uuid4().hex[:8]}", type="process")
    with pytest.raises(InvalidConfiguration, match="Prefect does not know it; rule: TYPE/NAME"):
        run_set_up(pool, alert_block=block)


def _beside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
    thread.start()
    return thread
