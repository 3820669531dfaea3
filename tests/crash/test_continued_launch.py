"""What a continuation of a deployed run is given, on a real server: all of its launch, of this run and store alone."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect import states
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, FlowRun
from prefect.context import FlowRunContext
from pydantic import SecretStr

from cairn.flows.orchestrator import known_stores
from cairn.flows.orchestrator.server_setup import StoreCredentials
from cairn.flows.preparation.training_request import TrainingRequest
from cairn.flows.watch_runs import watch_runs
from cairn.flows.watching.deployed_continuation import ContinuationByDeployment, begin_request, name_successor
from cairn.storage.errors import StoreUnavailable
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.configuration_source import load_configuration
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.policy.termination import FlowEnd, FlowOutcome
from tests.crash.deployed_run import successors
from tests.fabricated_run import configuration
from tests.settled_run import store_done

PREEMPTED = FlowEnd(reason=FlowOutcome.PREEMPTED, message="SIGTERM; the same command continues")
Begin = Callable[[RunLog], tuple[str, str]]
CONFIG = """
[data]
sources = ["text.txt"]
tokenizer = "bytes"
[model]
n_layer = 1
n_head = 1
n_embd = 8
block_size = 8
[training]
steps = 40
global_batch = 2
device = "cpu"
precision = "fp32"
kernels = "stock"
"""
ONLY_IN_THE_FILE = """
[evaluation]
command = ["true"]
[[evaluation.evaluators]]
name = "exam"
command = ["true"]
[exporters]
tensorboard = "curves"
[notify]
command = "true"
[preemption]
notice_file = "/notice"
[machines]
check = "true"
[cost]
gpu_hour_price = 2.5
"""
"""Evaluators, exporters, receivers of notices, what announces a preemption, a check and a price: no log has them."""
pytestmark = pytest.mark.xdist_group("deployment-steps")


@pytest.fixture
def begin(client: SyncPrefectClient, flow_run: FlowRun) -> Begin:
    """What a watcher does with the run."""
    assert flow_run.deployment_id is not None
    flow = client.read_flow(flow_run.flow_id).name

    def ask(log: RunLog) -> tuple[str, str]:
        return ContinuationByDeployment(f"{flow}/train-gpt", log.store.url).begin(log, silent_seconds=0.0)

    return ask


def test_a_successor_has_all_parameters_of_its_launch(
    client: SyncPrefectClient, flow_run: FlowRun, log: RunLog, launch: dict[str, Any]
) -> None:
    name_successor(PREEMPTED, log, print)
    (successor,) = successors(client, flow_run)
    assert successor.parameters == launch


def test_a_watcher_gives_a_crashed_run_all_parameters_of_its_launch_too(
    client: SyncPrefectClient, flow_run: FlowRun, log: RunLog, launch: dict[str, Any], begin: Begin
) -> None:
    client.set_flow_run_state(flow_run.id, states.Crashed(), force=True)
    assert begin(log)[0] == "continued"
    (successor,) = successors(client, flow_run)
    assert successor.parameters == launch


@pytest.mark.parametrize(
    "other", [{"run_id": "another"}, {"store": "s3://elsewhere/cairn"}, {"store": ""}, {"run_id": "", "config": "bard"}]
)
def test_parameters_of_another_run_or_store_are_not_believed_whatever_the_log_names(
    client: SyncPrefectClient,
    flow_run: FlowRun,
    log: RunLog,
    launch: dict[str, Any],
    begin: Begin,
    other: dict[str, str],
) -> None:
    client.update_flow_run(flow_run.id, parameters={**launch, "store_credentials": "secret-of-another", **other})
    client.set_flow_run_state(flow_run.id, states.Crashed(), force=True)
    assert "by the run's log alone" in begin(log)[1]
    (successor,) = successors(client, flow_run)
    assert successor.parameters == {"config": "", "run_id": log.run_id, "store": log.store.url}
    assert (successor.tags, successor.job_variables) == ([f"run:{log.run_id}"], None)


@pytest.fixture
def finished(tmp_path: Path) -> RunLog:
    """A run `done` of that configuration in the store: nothing but its start is left to be checked."""
    return store_done(LocalStore(tmp_path)).log


@pytest.fixture
def continued(
    client: SyncPrefectClient, flow_run: FlowRun, finished: RunLog, tmp_path: Path
) -> Iterator[TrainingRequest]:
    """What a continuation of that run is started with; the process takes itself for that flow run."""
    key = f"cairn-watch-{uuid4()}"
    made = client.create_flow_run_from_deployment(flow_run.deployment_id or uuid4(), idempotency_key=key)
    with FlowRunContext.model_construct(flow_run=made, parameters={}):
        config = str(tmp_path / "run.toml")
        yield TrainingRequest(config=config, run_id="done", store=finished.store.url, overrides=("cost.currency=EUR",))


def test_what_stands_only_in_the_configuration_is_there_after_a_preemption(
    continued: TrainingRequest, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(f'store = "elsewhere"\n{CONFIG}{ONLY_IN_THE_FILE}')
    resolved, config = begin_request(continued, "", pytest.fail)
    wanted = load_configuration(tmp_path / "run.toml", overrides=continued.overrides, environment={})
    for section in ("store", "evaluation", "exporters", "notify", "preemption", "machines", "cost"):
        assert getattr(config, section) == getattr(wanted, section) != getattr(configuration(), section), section
    assert resolved.configuration is not None  # so that damaged shards are built again from its sources


@pytest.mark.parametrize(
    ("text", "problem"),
    [(None, "no such configuration file"), (CONFIG.replace("= 40", "= 50"), "exists with another"), ("[", "as TOML")],
)
def test_without_its_configuration_a_continuation_goes_on_by_the_log_and_says_what_is_left_out(
    continued: TrainingRequest, tmp_path: Path, text: str | None, problem: str
) -> None:
    if text is not None:
        (tmp_path / "run.toml").write_text(text)
    said: list[str] = []
    resolved, config = begin_request(continued, "", said.append)
    assert (resolved.configuration, config.training.steps, config.cost.currency) == (None, 40, "EUR")
    assert problem in said[0] and "no source of its text is read again" in said[1]


def test_overrides_that_fit_no_more_are_left_out_too_and_named(continued: TrainingRequest) -> None:
    said: list[str] = []
    given = replace(continued, overrides=("evaluation.suite=gone.toml",))
    assert begin_request(given, "", said.append)[1].training.steps == 40
    assert "nor these overrides: evaluation.suite=gone.toml" in said[1]


def test_a_person_who_names_a_configuration_that_is_gone_is_refused(
    continued: TrainingRequest, flow_run: FlowRun
) -> None:
    with FlowRunContext.model_construct(flow_run=flow_run, parameters={}), pytest.raises(InvalidConfiguration):
        begin_request(continued, "", pytest.fail)


@pytest.mark.parametrize("store", [".", "{folder}", "file://{folder}"])
def test_a_start_writes_run_and_resolved_store_on_its_flow_run_where_after_crash_reads_them(
    client: SyncPrefectClient, flow_run: FlowRun, launch: dict[str, Any], finished: RunLog, tmp_path: Path, store: str
) -> None:
    (tmp_path / "done.toml").write_text(f'store = "{store.format(folder=tmp_path)}"\n{CONFIG}')
    begin_request(TrainingRequest(config=str(tmp_path / "done.toml")), "mine", pytest.fail)
    written = client.read_flow_run(flow_run.id).parameters
    assert written == {**launch, "run_id": "done", "store": finished.store.url}


@pytest.fixture
def forgotten(client: SyncPrefectClient) -> Iterator[None]:
    """No store of another test is on record, and none of this one stays there."""
    _forget(client)
    yield
    _forget(client)


def _forget(client: SyncPrefectClient) -> None:
    for variable in client.read_variables():
        if variable.name.startswith("cairn_store_"):
            client.delete_variable_by_name(variable.name)


@pytest.fixture
def recorded(flow_run: FlowRun, forgotten: None, tmp_path: Path) -> Callable[..., str]:
    """Has a deployed flow run put a store on record."""

    def record(folder: str, credentials: str = "") -> str:
        url = f"file://{tmp_path / folder}"
        known_stores.record_store(url, "bard", credentials, pytest.fail)
        return url

    return record


@pytest.fixture
def visited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str | None]]:
    """The stores of this test that are visited, with the key that is in the environment meanwhile."""
    monkeypatch.setenv("CAIRN_STORE", str(tmp_path / "own"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-workers")

    def visit(given: str = "") -> dict[str, str | None]:
        found = dict(
            known_stores.visit_stores(given, "", lambda url: [(url, os.environ.get("AWS_ACCESS_KEY_ID"))], print)
        )
        return {url: key for url, key in found.items() if str(tmp_path) in url}

    return visit


def test_without_a_store_the_workers_own_and_all_of_deployed_runs_are_visited_with_their_credentials(
    recorded: Callable[..., str], visited: Callable[..., dict[str, str | None]], tmp_path: Path
) -> None:
    block = f"block-{uuid4().hex[:8]}"
    StoreCredentials(access_key_id=SecretStr("of-the-store"), secret_access_key=SecretStr("s")).save(block)
    guarded, plain = recorded("guarded", block), recorded("plain")
    assert visited() == {f"file://{tmp_path}/own": "the-workers", guarded: "of-the-store", plain: "the-workers"}
    assert list(visited(plain)) == [plain]


def test_a_store_that_cannot_be_visited_costs_no_other_and_is_named_with_what_forgets_it(
    client: SyncPrefectClient, recorded: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_STORE", str(tmp_path / "own"))
    away, here, said, acted = recorded("away"), recorded("here"), list[str](), list[str]()

    def act(url: str) -> tuple[()]:
        acted.append(url)
        if url == away:
            raise StoreUnavailable("no answer")
        return ()

    with pytest.raises(StoreUnavailable):
        known_stores.visit_stores("", "", act, said.append)
    assert {away, here, f"file://{tmp_path}/own"} <= set(acted)
    (line,) = said
    assert "no answer" in line
    client.delete_variable_by_name(line.split("`")[1].removeprefix("prefect variable unset "))
    known_stores.visit_stores("", "", act, pytest.fail)


def test_watch_runs_finds_a_run_whose_configuration_named_its_store(
    recorded: Callable[..., str], finished: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_STORE", str(tmp_path / "empty"))
    recorded(".")
    state = watch_runs(deployment="", return_state=True)
    assert "left 1" in str(state.message)


def test_a_continuation_that_a_person_cancelled_stays_cancelled_and_the_watcher_says_so(
    client: SyncPrefectClient, flow_run: FlowRun, log: RunLog, begin: Begin
) -> None:
    name_successor(PREEMPTED, log, print)
    (successor,) = successors(client, flow_run)
    client.set_flow_run_state(successor.id, states.Cancelling(message="enough for today"))
    client.set_flow_run_state(flow_run.id, states.Crashed(), force=True)
    left = f"a person cancelled flow run {successor.id} before it trained; `prefect flow-run retry {successor.id}`"
    for _ in range(2):
        action, why = begin(log)
        assert action == "left" and why.startswith(left)
    assert len(successors(client, flow_run)) == 1


@pytest.mark.parametrize("why", ["live-owner: x", "fenced: x", "Deployment concurrency limit reached."])
def test_a_continuation_that_no_person_cancelled_is_followed_by_another(
    client: SyncPrefectClient, flow_run: FlowRun, log: RunLog, begin: Begin, why: str
) -> None:
    name_successor(PREEMPTED, log, print)
    (first,) = successors(client, flow_run)
    client.set_flow_run_state(first.id, states.Cancelled(message=why), force=True)
    client.set_flow_run_state(flow_run.id, states.Crashed(), force=True)
    assert begin(log)[0] == "continued"
    assert len(successors(client, flow_run)) == 2


@pytest.mark.parametrize("strategy", ConcurrencyLimitStrategy)
def test_a_deployment_that_cancels_what_is_beyond_its_limit_gets_a_successor_once_its_predecessor_has_left(
    client: SyncPrefectClient, flow_run: FlowRun, log: RunLog, strategy: ConcurrencyLimitStrategy, begin: Begin
) -> None:
    assert flow_run.deployment_id is not None
    limited = {"concurrency_limit": 1, "concurrency_options": {"collision_strategy": strategy}}
    client.update_deployment(flow_run.deployment_id, DeploymentUpdate.model_validate(limited))
    client.set_flow_run_state(flow_run.id, states.Crashed(), force=True)
    begin(log)
    (successor,) = successors(client, flow_run)
    assert successor.expected_start_time is not None and successor.created is not None
    waits = successor.expected_start_time - successor.created > timedelta(seconds=15)
    assert waits == (strategy is ConcurrencyLimitStrategy.CANCEL_NEW)
