"""Continues a run through its deployment: one flow run of `train-gpt`, on any worker.

Creating it is idempotent in the run and its newest attempt, so several watchers and a preempted flow run make one.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import Scheduled

from cairn.flows.orchestrator.flow_run import without_reasons
from cairn.flows.orchestrator.run_overview import flow_run_name
from cairn.flows.preparation.training_request import TrainingRequest, choose_run_id
from cairn.storage.logs import run_log, run_state
from cairn.storage.stores.codec import sha256
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.policy.termination import DecisionAction, FlowEnd, FlowOutcome
from cairn.tasks.text.format import one_line

MOST_FLOW_RUNS = 20
"""After so many flow runs that ended without claiming the run, a person has to find out why."""
STUCK_SECONDS = 600.0
"""A flow run that has not claimed its run by then has lost its worker, though Prefect shows it as Running."""


class ContinuationByDeployment:
    """Continues runs by flow runs of one deployment."""

    def __init__(self, deployment: str, store_url: str) -> None:
        """Take the deployment, `flow/deployment`; raises `InvalidConfiguration` if no Prefect API is named."""
        if not PREFECT_API_URL.value():
            raise InvalidConfiguration(f"deployment {deployment}: PREFECT_API_URL is not set, so no server knows it")
        self._deployment, self._store_url = deployment, store_url

    def begin(self, log: run_log.RunLog, *, silent_seconds: float, delay_seconds: float = 0.0) -> tuple[bool, str]:
        """Create a flow run that continues the run after the delay, unless one is scheduled or running."""
        with get_client(sync_client=True) as client:
            try:
                deployment_id = client.read_deployment_by_name(self._deployment).id
            except (ObjectNotFound, ValueError) as error:
                rule = "rule: flow/deployment, registered by `prefect deploy`"
                problem = f"deployment {self._deployment!r}: Prefect does not know it; {rule}"
                raise InvalidConfiguration(problem) from error
            states = {"type": {"any_": [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING]}}
            given = {"deployment_id": {"any_": [deployment_id]}, "state": states}
            unfinished = filters.FlowRunFilter.model_validate(given)
            for flow_run in client.read_flow_runs(flow_run_filter=unfinished, limit=200):
                if self._is_at(flow_run, log, silent_seconds):
                    return False, f"flow run {flow_run.name} is continuing it ({flow_run.state_name})"
            attempt, how = log.state.latest_attempt, "open" if log.state.open_attempt else "ended"
            run = f"{self._store_url} {log.run_id} {log.state.opening}"
            launch = _last_launch(client, deployment_id, log.state)
            # The launch gets its run's tag from the thread of its page, which a busy server may still keep waiting.
            tags = {f"run:{log.run_id}", *(without_reasons(launch.tags) if launch else ())}
            parameters = {"config": "", "run_id": log.run_id, "store": self._store_url}
            if launch is not None and launch.parameters.get("store_credentials") is not None:
                parameters["store_credentials"] = launch.parameters["store_credentials"]
            for number in range(MOST_FLOW_RUNS):
                key = sha256(f"{run} {attempt} {how} {number}".encode())
                flow_run = client.create_flow_run_from_deployment(
                    deployment_id,
                    parameters=parameters,
                    state=Scheduled(scheduled_time=datetime.now(UTC) + timedelta(seconds=delay_seconds)),
                    name=flow_run_name(log.run_id, attempt + 1),
                    idempotency_key=f"cairn-watch-{key}",
                    tags=sorted(tags),
                    work_queue_name=launch.work_queue_name if launch else None,
                    job_variables=launch.job_variables if launch else None,
                )
                if flow_run.state is None or not flow_run.state.is_final():
                    return True, f"flow run {flow_run.id} of {self._deployment}"
        many = f"{MOST_FLOW_RUNS} flow runs ended before they claimed it"
        return False, f"{many}; look at flow run {flow_run.id} in Prefect"

    def where(self, run_id: str) -> str:
        """Return where the flow runs that continued the run are found."""
        return f"flow runs of {self._deployment} named after {run_id}"

    def _is_at(self, flow_run: FlowRun, log: run_log.RunLog, silent_seconds: float) -> bool:
        is_scheduled = flow_run.state_type is StateType.SCHEDULED
        config, run_id, store = (flow_run.parameters.get(name) or "" for name in ("config", "run_id", "store"))
        is_another = not (config or run_id) or store not in ("", self._store_url)
        if is_another or (is_scheduled and flow_run.auto_scheduled):  # by a schedule, perhaps for next week
            return False
        # The flow run of an attempt that has ended has ended too, whatever its state says.
        claimed = {attempt.flow_run_id for attempt in log.state.attempts}
        is_dead = str(flow_run.id) in claimed or (not is_scheduled and silent_seconds > STUCK_SECONDS)
        return choose_run_id(TrainingRequest(config=config, run_id=run_id)) == log.run_id and not is_dead


def name_successor(end: FlowEnd, log: run_log.RunLog, say: Callable[[str], None]) -> FlowEnd:
    """Have this deployment's next flow run continue a preempted run after its back-off, and name it; never raises."""
    if end.reason != FlowOutcome.PREEMPTED:
        return end
    try:
        if runtime.deployment.get_id() is not None:
            own = f"{runtime.flow_run.get_flow_name()}/{runtime.deployment.get_name()}"
            ended = log.state.attempts[-1].ended if log.state.attempts else None
            is_resumed = ended is not None and ended.decision.action == DecisionAction.RESUME
            delay = ended.decision.delay_seconds if ended and is_resumed else 0.0
            deployed = ContinuationByDeployment(own, log.store.url)
            _, how = deployed.begin(log, silent_seconds=0.0, delay_seconds=delay)
            return replace(end, message=f"{end.message}; next: {how}")
    except Exception as error:  # whatever the API does, the end is the same
        say(f"no flow run was made that continues the run: {one_line(str(error) or type(error).__name__, 200)}")
    return end


def _last_launch(client: SyncPrefectClient, deployment_id: UUID, state: run_state.RunState) -> FlowRun | None:
    """Return this deployment's flow run that, by the log, trained the run last; no other's is believed."""
    names = dict.fromkeys(attempt.flow_run_id for attempt in reversed(state.attempts[-10:]))
    for name in filter(None, names):
        with suppress(ObjectNotFound, ValueError):
            flow_run = client.read_flow_run(UUID(name))
            if flow_run.deployment_id == deployment_id:
                return flow_run
    return None
