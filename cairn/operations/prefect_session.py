"""Runs the flow `train-gpt` in this process and returns how it ended; imports Prefect only when the session begins.

Without a server that answers, the run gets a temporary one; with no API at the end, the run log says how it ended.
"""

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from cairn.flows.operations.checkpoint_offer import end_on_record
from cairn.flows.orchestrator import prefect_settings, run_notices
from cairn.flows.orchestrator.session_server import SessionServer
from cairn.flows.preparation.training_request import HandedOver, ResolvedRequest, hand_over
from cairn.reports.exporters.exporters import run_exporters
from cairn.reports.notices.notice_delivery import delivering_notices
from cairn.storage.errors import StorageError
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.attempt.attempt_claim import refuse_live_owner
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.evaluator.evaluation_suite import suite_of
from cairn.tasks.machine import placement, process_scopes
from cairn.tasks.policy.termination import ExitCode, FlowEnd, FlowOutcome, flow_outcome
from cairn.tasks.text import output


def end_without_flow(log: RunLog, config: RunConfig, environment: Mapping[str, str]) -> FlowEnd | None:
    """Return the end of a run that is finished, after exporters and sweep; None for any other; raises `LiveOwner`."""
    by_person = not environment.get("CAIRN_CONTINUED_BY", "").strip()
    refuse_live_owner(log, config.lease, monotonic=time.monotonic, sleep=time.sleep, is_asked_by_person=by_person)
    if not (ended := end_on_record(log, config)):
        return None
    with (
        run_exporters(log, config.exporters, environment, output.say),
        delivering_notices(
            log.store, run_notices.all_receivers(config.notify), partial(run_notices.notices_of, log), output.say
        ),
        suppress(StorageError),
    ):
        sweep_run(log, config.checkpoint, suite_of(config.evaluation).sha256)
    step = log.state.high_water_step
    return FlowEnd(reason=FlowOutcome.COMPLETED, message=f"it is finished, at step {step}; nothing to do: {ended}")


def run_train_gpt(resolved: ResolvedRequest, config: RunConfig, log: RunLog, server: SessionServer) -> FlowEnd:
    """Run the flow for a checked request to its end in this process; raises what the flow's body raises.

    The run's attempt begins before a temporary server is started, and the flow goes on with it.
    """
    from cairn.flows.preparation.preflight import prepare_early
    from cairn.tasks.trainer.warm_trainer import warm_trainer

    folder = placement.trainer_folder(os.environ, log.run_id)
    with warm_trainer() as trainer, hand_over(resolved) as handed:
        server.choose()
        if log.refresh().finished is None:
            trainer.start(folder)
        if log.state.opened is None and server.is_ephemeral and not config.data.snapshot:
            measure = partial(trainer.measure_speed, folder)
            handed.wait_early = prepare_early(resolved, config, os.environ, measure)
        with process_scopes.collecting_no_garbage():
            prefect_settings.import_prefect(say=output.say, refresh=True)
            import cairn.flows.train_gpt  # noqa: F401
        before = log.state.latest_attempt
        if not server.is_ephemeral:
            return _run_flow(handed, log, server, before)
        from cairn.flows.run.early_attempt import early_attempt

        with early_attempt(handed, trainer, server.start):
            return _run_flow(handed, log, server, before)


def _run_flow(handed: HandedOver, log: RunLog, server: SessionServer, before: int, *, again: bool = True) -> FlowEnd:
    if not server.wait_ready():
        raise RuntimeError("there is no Prefect server")
    try:
        from cairn.flows.train_gpt import train_gpt

        state = train_gpt(
            config=handed.resolved.request.config,
            run_id=handed.resolved.run_id,
            overrides=list(handed.resolved.request.overrides),
            store=handed.resolved.store_url,
            start_over=handed.resolved.request.start_over,
            return_state=True,
        )
        if handed.end is not None:
            return handed.end
        if state.is_cancelling() or state.is_cancelled():
            return FlowEnd(reason=FlowOutcome.CANCELLED, message=explain_outside_state(str(state.name), log))
        state.result(raise_on_failure=True)
        raise RuntimeError(f"the flow ended {state.name}: {state.message}")
    except Exception as error:
        if (end := _end_without_prefect(error, log, before)) is not None:
            return end
        from cairn.flows.run.early_attempt import begun_early

        is_taken = begun_early() is None
        has_begun = is_taken and log.state.latest_attempt != before
        if (is_taken and log.state.open_attempt is not None) or not (has_begun or again):
            raise
    server.choose()  # it was lost after its first answer: before a flow's attempt, or between two
    return _run_flow(handed, log, server, log.state.latest_attempt if is_taken else before, again=has_begun)


def explain_outside_state(name: str, log: RunLog) -> str:
    """Return what to say of a flow that Prefect has ended before it could say anything itself."""
    attempts = log.refresh().attempts
    ended = attempts[-1].ended if attempts else None
    reached = f"attempt {ended.attempt} ended {ended.reason} at step {ended.last_step}" if ended else "no attempt ended"
    outside = f"this flow run was set to {name} in Prefect from outside"
    return f"{outside}; by the run log {reached}; the same command continues"


def _end_without_prefect(error: Exception, log: RunLog, before: int) -> FlowEnd | None:
    """Return how the attempt after `before` ended by the log, None if none ended or the run was to go on.

    Raises `error` unless it means that Prefect does not answer.
    """
    from httpx import HTTPStatusError, TransportError

    # The client's first request, for the server's version, wraps the error.
    cause = error.__cause__ if isinstance(error, RuntimeError) else error
    if not isinstance(cause, TransportError | HTTPStatusError):
        raise error
    state = log.refresh()
    ended = state.attempts[-1].ended if state.attempts else None
    if ended is not None and (ended.attempt != before or state.finished is not None):
        outcome = flow_outcome(ended.reason, ended.decision.action, ended.decision.charged)
        if outcome is not None:
            message = f"{ended.detail}; Prefect does not answer, so it shows no end: {error}"
            return FlowEnd(reason=outcome, message=message)
    return None


def leave_undelivered(code: ExitCode, server: SessionServer) -> None:
    """Exit at once with `code` if Prefect's API takes no events: at exit it would retry each of them for seconds."""
    from prefect.events.worker import EventsWorker

    outcome: Any = EventsWorker.drain_all(timeout=0.0 if server.is_lost else 30.0)
    if outcome.not_done:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
