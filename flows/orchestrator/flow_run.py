"""The flow run that shows a run, its cancellation by a person, and its end in Prefect's own words.

A deployment's flow run is known at once; that of a command's run is made later.
The witness of a command's run has its own thread: it starts the server after the first step, and whatever Prefect does
or does not do costs pages, never a step, a commit or an exit code.

Lists and automations of Prefect know only its own state names, so the reason of an end stands first in the message, in
a tag and in an event. A flow that no deployment has begun raises its expected errors instead. Unexpected errors keep
their traceback in both.
"""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial, wraps
from queue import SimpleQueue
from typing import Any, ParamSpec
from uuid import UUID

from httpx import TransportError
from prefect import Flow, State, Task, exceptions, get_client, get_run_logger, runtime, states
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import actions, objects

from cairn.flows.errors import EXPECTED_ERRORS
from cairn.flows.orchestrator import flow_run_tags, prefect_server
from cairn.flows.orchestrator.session_server import SessionServer
from cairn.tasks.attempt import preemption_notice, shutdown_signal
from cairn.tasks.machine.process_scopes import running_beside
from cairn.tasks.policy.termination import FlowEnd, FlowOutcome
from cairn.tasks.text.format import one_line

P = ParamSpec("P")
_STATES: Mapping[str, Callable[..., State[Any]]] = {
    FlowOutcome.COMPLETED: states.Completed,
    # What Prefect itself calls a flow run whose machine was taken: orange, not a red failure, and no automation for
    # failures fires, because the next flow run goes on where this one was.
    FlowOutcome.PREEMPTED: states.Crashed,
    FlowOutcome.INTERRUPTED: states.Cancelled,
    FlowOutcome.CANCELLED: states.Cancelled,
    FlowOutcome.PAUSED: states.Suspended,  # without a time limit, after which Prefect would call it failed
    # Another flow run continues it: nothing is lost, nothing is to be done.
    FlowOutcome.FENCED: states.Cancelled,
    "live-owner": states.Cancelled,
}
_CONTINUED = {*_STATES, FlowOutcome.TRAINED_ELSEWHERE} - {FlowOutcome.INTERRUPTED, FlowOutcome.CANCELLED}
"""Ends after which no person has to start anything."""
_RUNNING: Callable[..., State[Any]] = states.Running
Request = Callable[[SyncPrefectClient, UUID], object]
"""Something to ask of the server for this flow run."""
_POLL_SECONDS = 3.0
_QUEUED = 2_000  # requests that wait for a server; later ones are left out
_LAST_SECONDS = 60.0
"""How long the end of a short run waits for its server: as long as a slow machine takes to start one."""


class FlowRun:
    """Its id, None while there is none; its parameters; `echo` gets each line that the run prints."""

    def __init__(
        self,
        flow_run_id: str | None = None,
        *,
        parameters: Mapping[str, Any] | None = None,
        echo: Callable[[str], None] | None = None,
        is_expected: bool = False,
    ) -> None:
        """Take what is known; `is_expected` if a witness will make the flow run."""
        self.id, self.parameters, self.echo = flow_run_id, parameters or {}, echo
        self.keeps_name = False  # a person has named it
        self.is_expected = is_expected or flow_run_id is not None
        self.wanted = threading.Event()
        """Set by the first step of the run, or its end: the witness begins."""
        self.settled = threading.Event()
        """Set once it is known whether there is one."""
        if flow_run_id is not None or not is_expected:
            self.settled.set()

    def settle(self, flow_run_id: str | None) -> None:
        """Record the id, or that there will be none; the first answer stays."""
        if not self.settled.is_set():
            self.id = flow_run_id
            self.settled.set()
        self.wanted.set()

    def wait_id(self, timeout_seconds: float | None = None) -> UUID | None:
        """Wait until the id is known and return it; None if there is none by then."""
        self.settled.wait(timeout_seconds)
        return UUID(self.id) if self.id else None


class Witness:
    """Writes a run's steps, lines and end to the Prefect server, in the order in which they happened."""

    def __init__(self, flow: Flow[Any, Any], name: str, parameters: Mapping[str, Any], server: SessionServer) -> None:
        """Begin to wait for the first step; the flow run will have this name and these parameters."""
        self.flow_run = FlowRun(parameters=parameters, echo=self._log, is_expected=True)
        self._flow, self.name, self._server = flow, name, server
        self._requests = SimpleQueue[Request | None]()
        self._is_over = self._is_away = False
        self._thread = threading.Thread(target=self._show, name="witness", daemon=True)
        self._thread.start()

    @contextmanager
    def showing(self, task: Task[..., Any], name: str, own_id: UUID, after: list[UUID]) -> Iterator[list[State[Any]]]:
        """Show a step as a task run after others; the block adds the step's last state to the list."""
        ended = list[State[Any]]()

        def begin(client: SyncPrefectClient, flow_run_id: UUID) -> None:
            key, state = str(own_id), _RUNNING()
            inputs: Any = {"wait_for": [objects.TaskRunResult(id=before) for before in after]}
            client.create_task_run(task, flow_run_id, key, id=own_id, name=name, state=state, task_inputs=inputs)

        self._ask(begin)
        try:
            yield ended
        except BaseException as error:
            ended.append(states.Failed(message=f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._ask(lambda client, _: client.set_task_run_state(own_id, ended[-1], force=True))

    def finish(self, end: FlowEnd, *, at_once: bool) -> None:
        """Show how the run ended, with its reason as a tag; `at_once` waits for no server: the process has to leave."""
        if at_once:
            self.flow_run.settle(None)
        self.flow_run.wanted.set()

        def show(client: SyncPrefectClient, flow_run_id: UUID) -> None:
            with suppress(exceptions.PrefectHTTPStatusError):
                flow_run_tags.set_tags(client, client.read_flow_run(flow_run_id), (f"reason:{end.reason}",))
            client.set_flow_run_state(flow_run_id, shown_state(end), force=True)

        self._requests.put(show)  # not by `_ask`: however much was left out, the end is shown
        self._requests.put(None)
        self._thread.join(_LAST_SECONDS / 10 if at_once else _LAST_SECONDS)
        self._is_over = True

    def _log(self, message: str) -> None:
        at: Any = datetime.now(UTC)
        line = partial(actions.LogCreate, name="cairn", level=20, message=message, timestamp=at)
        self._ask(lambda client, flow_run_id: client.create_logs([line(flow_run_id=flow_run_id)]))

    def _ask(self, request: Request) -> None:
        if not self._is_over and self._requests.qsize() < _QUEUED:
            self._requests.put(request)

    def _show(self) -> None:
        try:
            self.flow_run.wanted.wait()
            is_settled = self.flow_run.settled.is_set
            if is_settled() or not self._server.wait_ready() or is_settled():
                return
            with suppress(Exception), get_client(sync_client=True) as client:  # whatever Prefect does, the run goes on
                given = dict(self.flow_run.parameters)
                tags, state = [f"run:{given.get('run_id')}"], _RUNNING()
                made = client.create_flow_run(self._flow, name=self.name, parameters=given, tags=tags, state=state)
                self.flow_run.settle(str(made.id))
                while (request := self._requests.get()) is not None and not self._server.is_lost:
                    try:
                        request(client, made.id)
                    except TransportError:
                        if not (self._is_away or self._server.is_lost):
                            self._server.say("Prefect does not answer: this run goes on, and its pages miss some of it")
                        self._is_away = True
                    except Exception:  # an API that fails costs this line
                        pass
        finally:
            self._is_over = True
            self.flow_run.settle(None)


class CancellationWatch:
    """Polls the state of one flow run, once there is one, in its own thread: Prefect sends no signal by itself.

    A person ends the process by Cancel or by Pause; Resume then starts another one in the same flow run.
    """

    def __init__(self, flow_run: FlowRun, shutdown: shutdown_signal.ShutdownSignal) -> None:
        # A person cannot reach the temporary server of a command.
        self._flow_run = FlowRun() if prefect_server.is_ephemeral_server(os.environ) else flow_run
        self._shutdown, self._can_resume = shutdown, flow_run.id is not None  # that of a command is made later
        self._poll_now, self._answered = threading.Event(), threading.Event()
        self._ended_by: State[Any] | None = None
        self._cancelled_in_slurm: bool | None = None

    def watching(self) -> AbstractContextManager[None]:
        """Poll every few seconds while the block runs; a cancellation requests the shutdown."""
        if not self._flow_run.is_expected:
            return nullcontext()
        return running_beside(self._poll, name="cancellation", join_seconds=0.0)

    def is_cancelling(self) -> bool:
        """Return whether it is cancelled; after a shutdown request it asks first, and a slow answer counts as no."""
        if self._flow_run.id is not None and self._shutdown.signal and self._ended_by is None:
            self._answered.clear()
            self._poll_now.set()
            self._answered.wait(_POLL_SECONDS)
        if self._ended_by is None and self._cancelled_in_slurm is None and self._shutdown.signal == "SIGTERM":
            self._cancelled_in_slurm = preemption_notice.is_cancelled_in_slurm(os.environ)
        return self._ended_by is not None or bool(self._cancelled_in_slurm)

    @property
    def outcome(self) -> FlowOutcome:
        """How the flow ends that a person cancelled."""
        is_paused = self._ended_by is not None and self._ended_by.is_paused()
        return FlowOutcome.PAUSED if is_paused else FlowOutcome.CANCELLED

    @property
    def where(self) -> str:
        """Where a person cancelled it, and in which words."""
        if self._ended_by is None:
            return "Slurm" if self._cancelled_in_slurm else "Prefect"
        how = "Prefect, by Pause; Resume continues it" if self._ended_by.is_paused() else "Prefect"
        return f"{how}: {one_line(self._ended_by.message, 500)}" if self._ended_by.message else how

    def _poll(self, stop: threading.Event) -> None:
        if (flow_run_id := self._flow_run.wait_id()) is None:
            return
        with suppress(Exception), get_client(sync_client=True) as client:  # whatever the API does, training goes on
            while not stop.is_set():
                self._poll_now.clear()
                with suppress(Exception):  # an API that does not answer is no cancellation
                    state = client.read_flow_run(flow_run_id).state
                    if state is not None and _is_end_by_person(state, can_resume=self._can_resume):
                        self._ended_by = state
                self._answered.set()
                if self._ended_by is not None:
                    self._shutdown.request("cancelled in Prefect", f"a person cancelled it in {self.where}")
                    return
                self._poll_now.wait(_POLL_SECONDS)


def _is_end_by_person(state: State[Any], *, can_resume: bool) -> bool:
    # A flow run that waits for a person's answer has a form, and was paused by itself.
    is_paused = can_resume and state.is_paused() and not state.state_details.run_input_keyset
    return is_paused or state.is_cancelling() or state.is_cancelled()


def completed(message: str) -> FlowEnd:
    """Return the end of a flow that has done all it was to do."""
    return FlowEnd(reason=FlowOutcome.COMPLETED, message=message)


def shown_state(end: FlowEnd) -> State[Any]:
    """Return the state, named as Prefect names its own, whose message begins with the reason."""
    message = end.message if end.reason == FlowOutcome.COMPLETED else f"{end.reason}: {end.message}"
    make: Callable[..., State[Any]] = _STATES.get(end.reason, states.Failed)
    return make(message=message)


def reason_of(error: BaseException) -> str:
    """Return the reason of a refusal: `ConfigDrift` is `config-drift`, `IntegrityError` is `integrity`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(error).__name__.removesuffix("Error")).lower()


def as_prefect_state(body: Callable[P, FlowEnd]) -> Callable[P, State[None]]:
    """Turn how the body ended, or its expected error, into the flow run's last state."""

    @wraps(body)
    def wrapper(*arguments: P.args, **keywords: P.kwargs) -> State[None]:
        is_deployed = runtime.deployment.get_id() is not None
        logging.getLogger("prefect.task_runs").setLevel(logging.CRITICAL)  # a line without a name for each
        try:
            end = body(*arguments, **keywords)
        except EXPECTED_ERRORS as error:
            if not is_deployed:
                raise
            end = FlowEnd(reason=reason_of(error), message=str(error))
        flow_run_id = runtime.flow_run.get_id()
        if is_deployed and end.reason not in _CONTINUED:
            end = replace(end, message=f"{end.message}; in a shell: prefect flow-run retry {flow_run_id}")
        state = shown_state(end)
        if flow_run_id and end.reason not in (FlowOutcome.PAUSED, FlowOutcome.TRAINED_ELSEWHERE):
            with suppress(Exception), get_client(sync_client=True) as client:
                flow_run_tags.set_tags(client, client.read_flow_run(UUID(flow_run_id)), (f"reason:{end.reason}",))
            flow_run_tags.emit_end(end, flow_run_id, runtime.flow_run.get_name() or "")
        if flow_run_id and is_deployed and not state.is_completed():
            logger = get_run_logger()
            # For a returned state the engine would log a long traceback, and for this one `Running` as the last word.
            with suppress(Exception), get_client(sync_client=True) as client:
                _set_last_state(client, UUID(flow_run_id), end.reason, state)
                logger.log(logging.ERROR if state.is_failed() else logging.WARNING, "%s", state.message)
                logging.getLogger("prefect.flow_runs").setLevel(logging.CRITICAL)
                raise exceptions.Abort(state.message)
        return state

    return wrapper


def _set_last_state(client: SyncPrefectClient, flow_run_id: UUID, reason: str, state: State[Any]) -> None:
    """Set the last state, unless it is another process's to set: one that trains, or that Resume starts."""
    if reason == FlowOutcome.PAUSED:
        now = client.read_flow_run(flow_run_id).state
        if now is not None and not now.is_paused():
            if now.is_running():  # resumed while this process was leaving, and perhaps refused for that
                client.set_flow_run_state(flow_run_id, states.Scheduled(name="Resuming"), force=True)
            return
    if reason != FlowOutcome.TRAINED_ELSEWHERE:
        client.set_flow_run_state(flow_run_id, state, force=True)
