"""Continues a run through its deployment: a flow run of `train-gpt`, on any worker, with the parameters of its launch.

Creating it is idempotent in the run and its newest attempt, so several watchers and a preempted flow run make one.
A flow run's parameters are its launcher's word. A log only names the flow run, so they are believed if its own run id
and store are the run's.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect import exceptions, runtime, settings
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters, objects
from prefect.context import FlowRunContext
from prefect.states import Scheduled

from cairn.flows.orchestrator import flow_run_tags, known_stores, run_overview
from cairn.flows.preparation.preflight import check_before_start
from cairn.flows.preparation.training_request import ResolvedRequest, TrainingRequest, choose_run_id, resolve_request
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.codec import sha256
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import ConfigDrift, InvalidConfiguration
from cairn.tasks.policy.run_watch import WatchAction
from cairn.tasks.policy.termination import DecisionAction, FlowEnd, FlowOutcome
from cairn.tasks.text.format import one_line

MOST_FLOW_RUNS = 20
"""After so many flow runs that ended without claiming the run, a person has to find out why."""
STUCK_SECONDS = 600.0
"""A flow run that has not claimed its run by then has lost its worker, though Prefect shows it as Running."""
_HANDOVER_SECONDS = 30.0
"""A deployment that cancels flow runs beyond its limit gets a successor once its predecessor has left."""
_KEY = "cairn-watch-"
_NOBODYS_CANCEL = ("Deployment concurrency limit", FlowOutcome.FENCED, FlowOutcome.INTERRUPTED, "live-owner")
"""How the message of a Cancelled state begins that no person has set: a deployment's limit, and ends of Cairn's own."""


class ContinuationByDeployment:
    """Continues runs by flow runs of one deployment."""

    def __init__(self, deployment: str, store_url: str) -> None:
        """Take the deployment, `flow/deployment`; raises `InvalidConfiguration` if no Prefect API is named."""
        if not settings.PREFECT_API_URL.value():
            raise InvalidConfiguration(f"deployment {deployment}: PREFECT_API_URL is not set, so no server knows it")
        self._deployment, self._store_url = deployment, store_url

    def begin(self, log: RunLog, *, silent_seconds: float, delay_seconds: float = 0.0) -> tuple[WatchAction, str]:
        """Create a flow run that continues the run after the delay, unless one is scheduled, running or cancelled."""
        with get_client(sync_client=True) as client:
            try:
                deployment = client.read_deployment_by_name(self._deployment)
            except (exceptions.ObjectNotFound, ValueError) as error:
                rule = "rule: flow/deployment, registered by `prefect deploy`"
                problem = f"deployment {self._deployment!r}: Prefect does not know it; {rule}"
                raise InvalidConfiguration(problem) from error
            if (found := self._find_running(client, deployment.id, log, silent_seconds)) is not None:
                return WatchAction.WAITS, f"flow run {found.name} is continuing it ({found.state_name})"
            limit = deployment.concurrency_options
            if limit is not None and limit.collision_strategy is objects.ConcurrencyLimitStrategy.CANCEL_NEW:
                delay_seconds = max(delay_seconds, _HANDOVER_SECONDS)
            launch, attempt = _last_launch(client, log), log.state.latest_attempt
            end = f"{attempt} {'open' if log.state.open_attempt else 'ended'}"
            given, tags = (launch.parameters, launch.tags) if launch else ({"config": ""}, [])
            here = launch if launch and launch.deployment_id == deployment.id else None
            for number in range(MOST_FLOW_RUNS):
                key = sha256(f"{self._store_url} {log.run_id} {log.state.opening} {end} {number}".encode())
                begins_at = datetime.now(UTC) + timedelta(seconds=delay_seconds)
                flow_run = client.create_flow_run_from_deployment(
                    deployment.id,
                    parameters={**given, "run_id": log.run_id, "store": self._store_url},
                    state=Scheduled(scheduled_time=begins_at),
                    name=run_overview.flow_run_name(log.run_id, attempt + 1),
                    idempotency_key=f"{_KEY}{key}",
                    # The launch gets its run's tag from the thread of its page, which a busy server keeps waiting.
                    tags=sorted({f"run:{log.run_id}", *flow_run_tags.without_reasons(tags)}),
                    work_queue_name=here.work_queue_name if here else None,
                    job_variables=here.job_variables if here else None,
                )
                if (state := flow_run.state) is None or not state.is_final():
                    how = "" if launch else ", by the run's log alone: no flow run has the parameters of its launch"
                    return WatchAction.CONTINUED, f"flow run {flow_run.id} of {self._deployment}{how}"
                if state.is_cancelled() and not (state.message or "").startswith(_NOBODYS_CANCEL):
                    again = f"`prefect flow-run retry {flow_run.id}` continues the run"
                    return WatchAction.LEFT, f"a person cancelled flow run {flow_run.id} before it trained; {again}"
        many = f"{MOST_FLOW_RUNS} flow runs ended before they claimed it"
        return WatchAction.WAITS, f"{many}; look at flow run {flow_run.id} in Prefect"

    def where(self, run_id: str) -> str:
        """Return where the flow runs that continued the run are found."""
        return f"flow runs of {self._deployment} named after {run_id}"

    def _find_running(
        self, client: SyncPrefectClient, deployment_id: UUID, log: RunLog, silent_seconds: float
    ) -> objects.FlowRun | None:
        """Return the deployment's unfinished flow run that continues the run."""
        states = {"type": {"any_": [objects.StateType.SCHEDULED, objects.StateType.PENDING, objects.StateType.RUNNING]}}
        rule = filters.FlowRunFilter.model_validate({"deployment_id": {"any_": [deployment_id]}, "state": states})
        # The flow run of an attempt that has ended has ended too, whatever its state says.
        claimed = {attempt.flow_run_id for attempt in log.state.attempts}
        for found in client.read_flow_runs(flow_run_filter=rule, limit=200):
            is_scheduled = found.state_type is objects.StateType.SCHEDULED
            config, run_id, store = (found.parameters.get(name) or "" for name in ("config", "run_id", "store"))
            is_another = not (config or run_id) or store not in ("", self._store_url)
            if is_another or (is_scheduled and found.auto_scheduled):  # by a schedule, perhaps for next week
                continue
            is_dead = str(found.id) in claimed or (not is_scheduled and silent_seconds > STUCK_SECONDS)
            if choose_run_id(TrainingRequest(config=config, run_id=run_id)) == log.run_id and not is_dead:
                return found
        return None


def name_successor(end: FlowEnd, log: RunLog, say: Callable[[str], None]) -> FlowEnd:
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


def _last_launch(client: SyncPrefectClient, log: RunLog) -> objects.FlowRun | None:
    """Return the deployed flow run of this run and store that, by the log, trained it last; no other's is believed."""
    names = dict.fromkeys(attempt.flow_run_id for attempt in reversed(log.state.attempts[-10:]))
    for name in filter(None, names):
        with suppress(exceptions.ObjectNotFound, ValueError):
            flow_run = client.read_flow_run(UUID(name))
            said = flow_run.parameters
            if flow_run.deployment_id and (said.get("run_id"), said.get("store")) == (log.run_id, log.store.url):
                return flow_run
    return None


def begin_request(
    request: TrainingRequest, credentials: str, say: Callable[[str], None]
) -> tuple[ResolvedRequest, RunConfig]:
    """Return the checked request of a flow run; that of a continuation may lose its configuration, and says so.

    A person's flow run is refused as a command is. A continuation whose configuration is gone, or is another run's by
    now, goes on as the log says, with the overrides of its launch if they still fit.
    """
    context, problem = FlowRunContext.get(), None
    key = context.flow_run.idempotency_key if context and context.flow_run else None
    kept = tuple(override for override in request.overrides if not override.startswith("store="))
    is_continuation = bool(key and request.config) and str(key).startswith(_KEY)
    by_log = [replace(request, config="", overrides=overrides) for overrides in (kept, ())] if is_continuation else []
    for chosen in (request, *by_log):
        try:
            resolved = resolve_request(chosen, os.environ)
            config = check_before_start(resolved, log := resolved.open_log(), os.environ)
        except (InvalidConfiguration, ConfigDrift) as error:
            problem = problem or error
            continue
        if problem is not None:
            say(f"goes on by the run's log alone: {problem}")
            lost = "no source of its text is read again, nothing of [notify]"
            left = "" if chosen.overrides == kept else f", nor these overrides: {', '.join(kept)}"
            say(f"left out with the configuration: {lost}{left}; mend it, and a flow run with it has all of it again")
        known_stores.record_store(log.store.url, log.run_id, credentials, say)
        return resolved, config
    assert problem is not None
    raise problem
