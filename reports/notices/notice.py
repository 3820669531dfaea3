"""Notices of the decisions in a run's log that a person wants to know of, and their delivery to receivers.

Delivery is at least once: a document beside the run lists the delivered notices, and a notice is repeated if the
process dies between its delivery and that record.
"""

import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from http.client import HTTPException
from typing import Any, Protocol

from cairn.reports.errors import ReportError
from cairn.reports.queries import run_lookup, run_status
from cairn.reports.text.answer_text import describe_end
from cairn.storage.errors import IntegrityError, ObjectMissing
from cairn.storage.logs import registry, run_log, run_state
from cairn.storage.stores import codec, object_store
from cairn.tasks.configuration.settings import NotifyConfig
from cairn.tasks.machine import http_request, process_scopes
from cairn.tasks.policy.termination import GIVEN_UP, DecisionAction, FlowOutcome, flow_outcome
from cairn.tasks.text.format import one_line

_OLD = timedelta(days=1)
"""Older decisions make no notice: a store that gets its first watcher does not repeat its history."""
_MOST_CHARACTERS, _LONGEST_PAUSE_SECONDS, _FORMAT_VERSION = 500, 60.0, 1


class NoticeKind(StrEnum):
    """The event that a notice is about."""

    FINISHED = "finished"
    BUDGET_EXHAUSTED = "budget-exhausted"
    STOPPED = "stopped"
    INTEGRITY = "integrity"
    APPROVAL_WANTED = "approval-wanted"
    SILENT = "silent"


_KINDS = dict.fromkeys((*GIVEN_UP, FlowOutcome.ERROR, FlowOutcome.STORAGE), NoticeKind.STOPPED)
_KINDS[FlowOutcome.BUDGET_EXHAUSTED] = NoticeKind.BUDGET_EXHAUSTED


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """One decision of one run; `key` is the same in every process that reads it, `text` a line for people."""

    run_id: str
    key: str
    kind: NoticeKind
    step: int
    at: datetime | None
    text: str

    @property
    def document(self) -> bytes:
        """The notice as receivers get it, as JSON: equal `id`s are one decision, sent again."""
        named = {name: getattr(self, name) for name in ("run_id", "kind", "step", "at", "text")}
        return codec.encode({"version": _FORMAT_VERSION, "id": f"{self.run_id}/{self.key}", **named})


def find_notices(
    run_id: str, state: run_state.RunState, read_registry: Callable[[str], registry.RegistryState], *, now: datetime
) -> Iterator[Notice]:
    """Yield the decisions of the last day; `read_registry` is asked only where an approval may be wanted."""
    opening = state.opening
    for record in state.checkpoints:
        if record.state == run_state.CheckpointState.QUARANTINED:
            prefix = record.committed.prefix.rpartition("/")[2]
            text = f"checkpoint {prefix} is quarantined: {record.detail}"
            key, step = f"quarantined-{prefix}@{opening}", record.committed.step
            yield _notice(run_id, key, NoticeKind.INTEGRITY, step, None, text)
    last = state.attempts[-1] if state.attempts else None
    if last is None or last.ended is None or last.ended_at is None or now - last.ended_at >= _OLD:
        return
    number, at, ended = f"{last.started.attempt:04d}", last.ended_at, last.ended
    if state.finished is not None:
        step = state.finished.step
        text = run_status.stopped_early(state) or f"it is finished, at step {step}"
        yield _notice(run_id, f"finished-{number}@{opening}", NoticeKind.FINISHED, step, at, text)
        config = run_lookup.configuration_document(state)
        alias = codec.stored_value(config, "promotion", "alias", str)
        if alias and codec.stored_value(config, "promotion", "require_approval", bool):
            decided = [item.promoted or item.refused for item in read_registry(alias).history]
            if not any(body is not None and body.run_id == run_id for body in decided):
                wish = f"its promotion to {alias} waits for a person, unless a gate refuses it"
                text = f"{wish}: `cairn promote {run_id}`"
                yield _notice(run_id, f"approval-{number}@{opening}", NoticeKind.APPROVAL_WANTED, step, at, text)
    elif ended.decision.action == DecisionAction.STOP:
        decision = ended.decision
        outcome = flow_outcome(ended.reason, decision.action, decision.charged, is_spent=decision.is_spent)
        if outcome in _KINDS:
            text = f"attempt {last.started.attempt} ended: {ended.reason}: {describe_end(ended)}"
            yield _notice(run_id, f"ended-{number}@{opening}", _KINDS[outcome], ended.last_step, at, text)


def silent_notice(run_id: str, opening: str, attempt: int, step: int, seconds: float) -> Notice:
    """Return the notice of an open attempt that has shown no life for two leases."""
    text = f"attempt {attempt} has shown no sign of life for {seconds:.0f} seconds, and nothing has continued the run"
    return _notice(run_id, f"silent-{attempt:04d}@{opening}", NoticeKind.SILENT, step, None, text)


def _notice(run_id: str, key: str, kind: NoticeKind, step: int, at: datetime | None, text: str) -> Notice:
    said = one_line(f"cairn run {run_id}: {text}", _MOST_CHARACTERS)
    return Notice(run_id=run_id, key=key, kind=kind, step=step, at=at, text=said)


class Receiver(Protocol):
    """Takes one notice; may raise anything and take any time."""

    name: str
    """Its name in messages, and in the record of delivered notices."""

    def receive(self, notice: Notice) -> None:
        """Pass the notice on; returning says that it arrived."""


class CommandReceiver:
    """Runs a command for each notice; exit code 0 says that it arrived."""

    name = "command"

    def __init__(self, command: str, timeout_seconds: float) -> None:
        self._words, self._timeout_seconds = shlex.split(command), timeout_seconds

    def receive(self, notice: Notice) -> None:
        """Run the command with the notice as JSON on its standard input; it is killed when its time is over."""
        streams: Any = {"input": notice.document, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        try:
            done = subprocess.run(self._words, timeout=self._timeout_seconds, check=False, **streams)
        except subprocess.TimeoutExpired:
            raise ReportError(f"the command took more than {self._timeout_seconds:g} s") from None
        if done.returncode:
            raise ReportError(f"the command left with {done.returncode}")


class WebhookReceiver:
    """Posts each notice as JSON; any status of success says that it arrived. No redirect is followed."""

    name = "webhook"

    def __init__(self, address: str, timeout_seconds: float) -> None:
        self._address, self._timeout_seconds = address, timeout_seconds

    def receive(self, notice: Notice) -> None:
        """Post the notice; the error says nothing of the address, which may be a secret."""
        headers = {"Content-Type": "application/json", "User-Agent": "cairn"}
        try:
            request = urllib.request.Request(self._address, notice.document, headers, method="POST")
            http_request.open_directly(request, timeout_seconds=self._timeout_seconds).close()
        except urllib.error.HTTPError as error:
            with error:
                raise ReportError(f"the webhook answered {error.code}") from None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None)
            why = reason if isinstance(reason, OSError) else type(error).__name__  # a text may hold the address
            raise ReportError(f"the webhook did not take it: {why}") from None


def make_receivers(notify: NotifyConfig) -> Iterator[Receiver]:
    """Yield the receivers that need no orchestrator."""
    if notify.command:
        yield CommandReceiver(notify.command, notify.timeout_seconds)
    if notify.webhook:
        yield WebhookReceiver(notify.webhook.get_secret_value(), notify.timeout_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliveredNotices:
    """The keys of one run's notices that one receiver has."""

    version: int = 1
    delivered: tuple[str, ...] = ()


class NoticeDelivery:
    """Delivers to one receiver the notices that neither this process nor another has delivered."""

    def __init__(self, store: object_store.ObjectStore, receiver: Receiver) -> None:
        self._store, self._receiver = store, receiver
        self._delivered: dict[str, tuple[str, ...]] = {}

    def deliver(self, notices: Iterable[Notice]) -> None:
        """Deliver new notices in order; raises the receiver's error or the store's, and the next call goes on there."""
        for notice in notices:
            if notice.key in self._delivered.get(notice.run_id, ()):
                continue
            prefix, delivered = run_log.run_prefix(notice.run_id), tuple[str, ...]()
            key = f"{prefix}/notices/{self._receiver.name}.json"
            with suppress(ObjectMissing, IntegrityError):  # delivered again rather than never
                delivered = codec.decode(self._store.read(key), DeliveredNotices, where=key).delivered
            if notice.key not in delivered:
                self._receiver.receive(notice)
                delivered = (*delivered, notice.key)
                self._store.write(key, codec.encode(DeliveredNotices(delivered=delivered)))
            self._delivered[notice.run_id] = delivered


@contextmanager
def delivering_notices(
    store: object_store.ObjectStore,
    receivers: Sequence[Receiver],
    find: Callable[[], Iterable[Notice]],
    say: Callable[[str], None],
    *,
    every_seconds: float = 5.0,
    final_seconds: float = 5.0,
) -> Iterator[None]:
    """Deliver the notices of `find` while the block runs; at its end each receiver has `final_seconds` for the rest."""
    times = {"every_seconds": every_seconds, "longest_seconds": _LONGEST_PAUSE_SECONDS, "join_seconds": final_seconds}

    def deliver(delivery: NoticeDelivery, is_last: bool) -> None:
        delivery.deliver(find())

    def report(name: str, error: Exception) -> None:
        why = one_line(f"{type(error).__name__}: {error}", 200)
        say(f"notify.{name} is tried again later, training goes on: {why}")

    with ExitStack() as threads:
        for receiver in receivers:
            name, delivering = receiver.name, partial(deliver, NoticeDelivery(store, receiver))
            beside = process_scopes.repeating_beside(delivering, partial(report, name), name=f"{name}-notices", **times)
            threads.enter_context(beside)
        yield
