"""Asks a person in Prefect to approve a promotion that every other gate has passed.

A deployed flow run is suspended: its process ends, and the answer starts it again from the top. Any other flow run
waits in its process. Without a server that a person can open, the question stays unanswered; that is no refusal.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import SetStateStatus
from prefect.flow_runs import suspend_flow_run
from prefect.input.run_input import keyset_from_paused_state, run_input_subclass_from_type
from prefect.runtime import deployment
from prefect.settings import PREFECT_API_URL
from prefect.states import Paused
from prefect.utilities.urls import url_for
from pydantic import BaseModel, ConfigDict, Field

from flows.orchestrator.ephemeral_server import is_ephemeral_server
from reports.queries.display_tables import markdown_text
from storage.logs.registry import Promoted
from storage.stores.document import sha256
from tasks.attempt.shutdown_signal import ShutdownSignal
from tasks.checkpoints.promotion import Approval

POLL_SECONDS = 2.0
_SLACK_SECONDS = 3600.0
"""Prefect fails a flow run that resumes after Prefect's own deadline, so that is later than ours."""


class PromotionApproval(BaseModel):
    """The form that a person fills in."""

    model_config = ConfigDict(extra="forbid")

    approve: bool = Field(description="yes: the alias points at this checkpoint from now on; no: it is refused")
    by: str = Field(min_length=1, description="who you are, for the record")
    why: str = Field(default="", description="your reason, for the record")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The promotion as it would be recorded, and what the alias points at now."""

    proposal: Promoted
    champion: Promoted | None
    timeout_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """What ends the wait besides an answer; `say` prints a line, `show` puts Markdown on the run's page."""

    shutdown: ShutdownSignal
    is_settled: Callable[[], bool]
    say: Callable[[str], None]
    show: Callable[[str], None]


def ask(question: Question, flow_run_id: str | None, waiting: Waiting) -> Approval | str:
    """Return the answer, or why there is none; in a deployed flow run the first call ends the process."""
    if not PREFECT_API_URL.value() or is_ephemeral_server(os.environ) or flow_run_id is None:
        return "no Prefect server is named (PREFECT_API_URL) where a person could be asked"
    form: Any = run_input_subclass_from_type(PromotionApproval)
    form = form.with_initial_data(description=describe(question))
    try:
        with get_client(sync_client=True) as client:
            asked_before = client.read_flow_run(UUID(flow_run_id)).empirical_policy.pause_keys or set()
            if not deployment.get_id():
                return _wait(client, UUID(flow_run_id), form, question, waiting)
        if _key(question) not in asked_before:  # else this process was started by the answer
            _announce(question, flow_run_id, waiting)
        timeout = int(question.timeout_seconds)
        return _approval(suspend_flow_run(wait_for_input=form, timeout=timeout, key=_key(question)))
    except Exception as error:  # whatever the API does, the run is trained and nothing is decided
        return f"Prefect could not ask: {error}"


def describe(question: Question) -> str:
    """Return the Markdown above the form."""
    new, old = question.proposal, question.champion
    before = old.metrics if old else {}
    rows = [
        f"| checkpoint | {new.run_id}@{new.step} | {f'{old.run_id}@{old.step}' if old else '–'} |",
        f"| manifest | {new.manifest_sha256[:8]} | {old.manifest_sha256[:8] if old else '–'} |",
    ]
    rows += [
        f"| {markdown_text(name)} | {value:.4f} | {f'{before[name]:.4f}' if name in before else '–'} |"
        for name, value in sorted(new.metrics.items())
    ]
    lines = [
        f"# May `{new.alias}` point at `{new.run_id}@{new.step}`?",
        f"Every other gate said yes: {markdown_text(new.why)}."
        + (f" The loss curve is {markdown_text(new.verdict)}." if new.verdict else ""),
        "\n".join(["| | offered | now |", "|---|---|---|", *rows]),
        f"`cairn sample {new.run_id}@{new.step}` lets it write. `cairn promote {new.run_id}@{new.step}` is a yes too.",
    ]
    return "\n\n".join(lines)


def _announce(question: Question, flow_run_id: str, waiting: Waiting) -> None:
    """Say the question with its deadline and where it is answered, and show it on the run's page."""
    named, alias = f"{question.proposal.run_id}@{question.proposal.step}", question.proposal.alias
    until = f"{datetime.now(UTC) + timedelta(seconds=question.timeout_seconds):%Y-%m-%d %H:%M:%S} UTC"
    waiting.say(
        f"may {alias} point at {named}? It waits for approval until {until}: resume flow run {flow_run_id} in "
        f"Prefect, {url_for('flow-run', obj_id=flow_run_id)}, or `cairn promote {named}` in another terminal"
    )
    waiting.show(
        f"**May `{alias}` point at `{named}`? It waits for approval until {until}.** "
        f"[Open the flow run](../../runs/flow-run/{flow_run_id}) and choose Resume (in its menu): a form asks for the "
        f"answer. `cairn promote {named}`, typed by a person, is a yes too."
    )


def _key(question: Question) -> str:
    asked = f"{question.proposal.alias} {question.proposal.manifest_sha256}"
    return sha256(asked.encode())[:32]


def _wait(
    client: SyncPrefectClient, flow_run_id: UUID, form: Any, question: Question, waiting: Waiting
) -> Approval | str:
    paused: State[Any] = Paused(
        timeout_seconds=int(question.timeout_seconds + _SLACK_SECONDS), pause_key=_key(question)
    )
    keyset = keyset_from_paused_state(paused)
    paused.state_details.run_input_keyset = {str(name): key for name, key in keyset.items()}
    answer = client.set_flow_run_state(flow_run_id, paused)
    if answer.status is not SetStateStatus.ACCEPT:
        return f"Prefect did not pause the flow run: {answer.details}"
    form.save(keyset, flow_run_id)
    _announce(question, str(flow_run_id), waiting)
    deadline, woken = time.monotonic() + question.timeout_seconds, threading.Event()
    with waiting.shutdown.on_shutdown(woken.set):
        while not woken.is_set():
            if _has_resumed(client, flow_run_id):
                return _approval(form.load(keyset, flow_run_id))
            if waiting.is_settled():
                return "it was decided elsewhere meanwhile"
            if time.monotonic() >= deadline:
                return f"nobody answered in Prefect within {question.timeout_seconds:g} s"
            woken.wait(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
    return f"{waiting.shutdown.signal} came before an answer"


def _has_resumed(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
    try:
        state = client.read_flow_run(flow_run_id).state
    except Exception:  # an API that is away for a while may come back with the answer
        return False
    return state is not None and state.is_running()


def _approval(answer: BaseModel) -> Approval:
    given = PromotionApproval.model_validate(answer.model_dump())
    return Approval(is_given=given.approve, by=given.by, why=given.why)
