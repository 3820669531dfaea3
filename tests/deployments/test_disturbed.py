"""Runs whose configurations name their stores, on two workers, each disturbed, while the server is killed twice."""

import itertools
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.local_store import LocalStore
from tests.crash.prefect_api import JOB_TEMPLATE, ROOT, SETTLED
from tests.crash.prefect_server import Server
from tests.crash.training_command import Command, configuration
from tests.crash.victims import kill
from tests.full_amount import share_of
from tests.processes.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.xdist_group("up")]
RUNS, STORES, STEPS, KILLED_EVERY = 20 // share_of(4), 4, 15, 5
FAULTS = {"one": "preempt@4,bad-data@8", "two": "kill@4,oom@8"}
"""Met by the runs of each worker; of every fifth run the flow's process is killed too, once it has committed."""
PASSWORD = "somebody:with a password"
SERVER = ("cairn.flows.orchestrator.prefect_server",)
_WATCH_SECONDS = 60.0
"""Stands in for the schedule of `watch-runs`, which is four times an hour."""
_ALIVE = frozenset({"RUNNING", "PENDING", "SCHEDULED", "CANCELLING"})


class Workplace:
    """The server that `make up` starts, killed and started again, the deployments, two workers, and the runs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._killed = folder, set[int]()
        (folder / "home").mkdir()
        kept = {name: value for name, value in os.environ.items() if name != "CAIRN_STORE"}
        given = {"CAIRN_CACHE": str(folder / "cache"), "PREFECT_SERVER_API_AUTH_STRING": PASSWORD}
        self.server = Server(folder / "home", program=SERVER, **given)
        told = {"PREFECT_API_URL": self.server.url, "PREFECT_API_AUTH_STRING": PASSWORD}
        asking = {"PREFECT_WORKER_QUERY_SECONDS": "2", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
        self._environment = {**kept, **told, **asking, "CAIRN_CACHE": str(folder / "cache")}
        setup = ("cairn.flows.orchestrator.server_setup", "--pool", "cairn", "--job-template", JOB_TEMPLATE)
        subprocess.run([*SETTLED, *setup], cwd=ROOT, env=self._environment, check=True, timeout=240)
        self._workers = [self._start_worker(name) for name in FAULTS]

    def _start_worker(self, name: str) -> "subprocess.Popen[bytes]":
        words = ["prefect", "worker", "start", "--pool", "cairn", "--name", name, "--limit", "2"]
        environment = {**self._environment, "CAIRN_FAULTS": FAULTS[name]}
        with (self._folder / f"worker-{name}.txt").open("wb") as output:
            return subprocess.Popen([*SETTLED, *words], cwd=ROOT, env=environment, stdout=output, stderr=output)

    def ask_for(self, deployment: str, parameters: Mapping[str, Any]) -> None:
        with get_client(sync_client=True) as client:
            found = client.read_deployment_by_name(deployment)
            client.create_flow_run_from_deployment(found.id, parameters=dict(parameters))

    def flow_runs(self) -> list[FlowRun]:
        names = {"name": {"any_": ["train-gpt", "watch-runs"]}}
        with get_client(sync_client=True) as client:
            found = client.read_flow_runs(flow_filter=filters.FlowFilter.model_validate(names), limit=200)
        return [item for item in found if not item.auto_scheduled]

    def launch(self, number: int) -> None:
        config = self._folder / f"run-{number}.toml"
        config.write_text(f'store = "store-{number % STORES}"\n{configuration(steps=STEPS)}')
        self.ask_for("train-gpt/train-gpt", {"config": str(config), "run_id": f"run-{number}"})

    def state(self, number: int) -> RunState:
        return RunLog(LocalStore(self._folder / f"store-{number % STORES}"), f"run-{number}").refresh()

    def kill_flow(self, number: int) -> None:
        """Kill the process of the run's flow once."""
        owner = self.state(number).open_attempt
        if number not in self._killed and owner and owner.last_committed_step:
            self._killed.add(number)
            kill(owner.started.placement.pid)

    def end(self) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.wait(timeout=120)
        self.server.kill()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    place = Workplace(tmp_path)
    with temporary_settings({PREFECT_API_URL: place.server.url, PREFECT_API_AUTH_STRING: PASSWORD}):
        yield place
    place.end()


def disturb_until_all_end(place: Workplace) -> None:
    """Kill flow runs and, at a quarter and half of the runs' ends, the server; `watch-runs` looks now and then."""
    looked, server_kills = time.monotonic(), itertools.chain((RUNS // 4, RUNS // 2), itertools.repeat(RUNS + 1))
    next_kill = next(server_kills)
    while (ended := sum(place.state(number).finished is not None for number in range(RUNS))) < RUNS:
        for number in range(0, RUNS, KILLED_EVERY):
            place.kill_flow(number)
        if ended >= next_kill:
            next_kill = next(server_kills)
            place.server.kill()
            place.server.start()
        if time.monotonic() - looked > _WATCH_SECONDS:
            looked = time.monotonic()
            with suppress(Exception):  # a server that is busy is asked again
                place.ask_for("watch-runs/watch-runs", {})
        time.sleep(0.5)


def test_all_end_with_the_undisturbed_bits_and_no_flow_run_is_red(place: Workplace, tmp_path: Path) -> None:
    for number in range(RUNS):
        place.launch(number)
    (tmp_path / "calm").mkdir()
    calm = Command(tmp_path / "calm", place.server.url, environment={"PREFECT_API_AUTH_STRING": PASSWORD})
    (calm.folder / "run.toml").write_text(configuration(steps=STEPS))
    calm.train()
    disturb_until_all_end(place)
    states = [place.state(number) for number in range(RUNS)]
    assert {state.finished and state.finished.state_sha256 for state in states} == {calm.state_sha256()}
    wait_until(lambda: not any(item.state_type in _ALIVE for item in place.flow_runs()), "the end of all flow runs")
    ends = [(attempt.flow_run_id, attempt.ended) for state in states for attempt in state.attempts]
    taken = {flow_run for flow_run, ended in ends if ended and ended.reason in ("preempted", "lost")}
    shown = [(str(item.id), item.name, str(item.state_name)) for item in place.flow_runs()]
    print(Counter(state for *_, state in shown), Counter(ended.reason for _, ended in ends if ended))
    assert [one for one in shown if one[2] == "Failed" or (one[2] == "Crashed" and one[0] not in taken)] == []
