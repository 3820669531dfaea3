"""The flow `train-gpt` run in this process: Prefect made quiet, its own server started safely, its end made a code.

Owns everything the command must know of Prefect, and what happens where its API is away: at the start the run gets a
server of its own, at the end the log says how it ended. Imports it only when a session begins. Refuses to know what the
flow does.
"""

import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.orchestrator.ephemeral_server import EphemeralServer
from flows.orchestrator.named_server import is_server_named
from flows.orchestrator.server_address import server_address
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from storage.stores.open_store import open_store
from tasks.errors import InvalidConfiguration
from tasks.machine.work_folder import trainer_folder
from tasks.policy.termination import EXIT_CODES, ExitCode, final_state

if TYPE_CHECKING:
    from flows.preparation.preflight import TrainingRequest

# A person sees our own progress; Prefect's log would show it twice, and every refusal as a traceback.
QUIET = {
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "DO_NOT_TRACK": "1",
}


_PATIENCE_SECONDS = 10.0
"""A server that is restarted comes back in about this time; starting one of its own takes as long."""
_ASK_SECONDS = 3.0
_DELIVERY_SECONDS = 30.0
_REFUSALS = (401, 403)
_REFUSED = (
    "Prefect's server refuses: it asks for a password or key that is not given or not right; set "
    "PREFECT_API_AUTH_STRING (or PREFECT_API_KEY) to the server's, or unset PREFECT_API_URL for one of its own"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowEnd:
    """How the flow ended: the command's exit code, and what the last state said."""

    code: ExitCode
    message: str


class PrefectServer:
    """The server a run is shown on: the one that is named, else one of the command's own, begun as early as it can."""

    def __init__(self, environment: MutableMapping[str, str], *, say: Callable[[str], None]) -> None:
        """Start nothing yet."""
        self._environment, self._say = environment, say
        self._own: EphemeralServer | None = None

    def begin_own(self) -> None:
        """Start an own server where none is named, and name it, for whoever imports Prefect from now on.

        It ends with this process, whatever refuses the run. Beginning again changes nothing.
        """
        environment = self._environment
        if self._own is not None or is_server_named(environment, Path.cwd(), ask_prefect=_ask_prefect):
            return
        quieten(environment)
        if password := environment.get("PREFECT_SERVER_API_AUTH_STRING"):  # the server asks what its clients then say
            environment["PREFECT_API_AUTH_STRING"] = password
        self._own = EphemeralServer(environment)
        self._own.name_in(environment)

    def settle(self) -> None:
        """Know which server it is, and say so where it has to start; one that is named is given a moment to answer."""
        if self._own is None:
            _forget_absent_server(self._environment, self._say)
            self.begin_own()
        if self._own is not None:
            self._say("starting Prefect's own server, some seconds (PREFECT_API_URL names one that runs already) …")

    def replace_lost(self) -> None:
        """Have one that answers again: the named one, if it is back in a moment, else one of the command's own."""
        if self._own is not None:
            self._own.stop()
            self._own.forget_in(self._environment)
            self._own = None
        self.settle()

    def wait_ready(self) -> None:
        """Wait until an own server answers."""
        if self._own is not None:
            from prefect.context import refresh_global_settings_context

            refresh_global_settings_context()  # they may have been read already, to ask whether a server is named
            self._own.wait_ready()


def run_train_gpt(request: "TrainingRequest", store: str, server: PrefectServer) -> FlowEnd:
    """Run the flow to its end in this process; raises whatever the flow's body raised."""
    from flows.preparation.preflight import named_run
    from tasks.trainer.warm_trainer import warm_trainer

    quieten(os.environ)
    log = RunLog(open_store(store), named_run(request))
    with warm_trainer() as trainer:
        # Server, trainer and this process import for seconds each: all three at once.
        server.settle()
        if log.refresh().finished is None:
            trainer.begin(trainer_folder(os.environ, log.run_id))
        return _run_flow(request, log, store, server)


def _run_flow(
    request: "TrainingRequest", log: RunLog, store: str, server: PrefectServer, *, again: bool = True
) -> FlowEnd:
    before = log.state.latest_attempt
    server.wait_ready()
    try:
        state = _call_flow(request, log.run_id, store)
    except Exception as error:
        if not _is_prefect_away(error):
            raise
        end = _end_on_record(log.refresh(), before)
        if end is not None:
            return replace(end, message=f"{end.message}; Prefect does not answer, so it shows no end: {error}")
        if _is_refusal(error):
            raise InvalidConfiguration(_REFUSED) from error
        if not again or log.state.latest_attempt != before:
            raise
    else:
        return _end_of_flow(state)
    server.replace_lost()  # it went after its first answer, before anything of the run began
    return _run_flow(request, log, store, server, again=False)


def _call_flow(request: "TrainingRequest", run_id: str, store: str) -> Any:
    from flows.train_gpt import train_gpt

    return train_gpt(
        config=request.config,
        run_id=run_id,
        overrides=list(request.overrides),
        store=store,
        start_over=request.start_over,
        return_state=True,
    )


def _end_of_flow(state: Any) -> FlowEnd:
    code = EXIT_CODES.get(state.name or "")
    if code is None:
        state.result(raise_on_failure=True)
        raise RuntimeError(f"the flow ended {state.name}: {state.message}")
    return FlowEnd(code=code, message=state.message or "")


def _is_prefect_away(error: Exception) -> bool:
    from httpx import HTTPStatusError, TransportError

    # Its first question, for the server's version, wraps what went wrong.
    cause = error.__cause__ if isinstance(error, RuntimeError) else error
    return isinstance(cause, TransportError | HTTPStatusError)


def _is_refusal(error: Exception) -> bool:
    from httpx import HTTPStatusError

    return isinstance(error, HTTPStatusError) and error.response.status_code in _REFUSALS


def leave_undelivered(code: ExitCode) -> None:
    """Leave at once with `code` where Prefect's API does not take what it has not been told yet.

    At its exit Prefect would try every event again for seconds: for a long run that lost its server, hours.
    """
    from prefect.events.worker import EventsWorker

    outcome: Any = EventsWorker.drain_all(timeout=_DELIVERY_SECONDS)
    if outcome.not_done:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_on_record(state: RunState, before: int) -> FlowEnd | None:
    """Return how the newest attempt ended, or None: none has ended since attempt `before`, or it was to go on."""
    ended = state.attempts[-1].ended if state.attempts else None
    if ended is None or (ended.attempt == before and state.finished is None):
        return None
    name = final_state(ended.reason, ended.decision.action)
    return None if name is None else FlowEnd(code=EXIT_CODES[name], message=ended.detail)


def _forget_absent_server(environment: MutableMapping[str, str], say: Callable[[str], None]) -> None:
    url, began = server_address(environment), time.monotonic()
    while url and not _answers(url):
        if time.monotonic() - began >= _PATIENCE_SECONDS:
            say(f"{url} does not answer: this run is not shown there")
            del environment["PREFECT_API_URL"]
            return
        time.sleep(1.0)


def _answers(url: str) -> bool:
    """Whether anybody is there, whatever the answer is."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=_ASK_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False


def quieten(environment: MutableMapping[str, str]) -> None:
    """Set what a person has not set."""
    for name, value in QUIET.items():
        environment.setdefault(name, value)


def _ask_prefect() -> str | None:
    from prefect.settings import PREFECT_API_URL

    url: str | None = PREFECT_API_URL.value()
    return url
