"""Delivers notices to receivers (a command, a webhook, others); a document beside the run lists the delivered ones.

Delivery is at least once: a notice is repeated if the process dies between its delivery and that record.
"""

import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from cairn.reports.errors import ReportError
from cairn.reports.notices.notice import Notice
from cairn.storage.errors import IntegrityError, ObjectMissing
from cairn.storage.logs.run_log import run_prefix
from cairn.storage.stores import document, object_store
from cairn.tasks.configuration.settings import NotifyConfig
from cairn.tasks.machine.http_request import open_directly
from cairn.tasks.machine.process_scopes import repeating_beside
from cairn.tasks.text.format import one_line

_LONGEST_PAUSE_SECONDS = 60.0


class Receiver(Protocol):
    """Takes one notice; may raise anything and take any time."""

    @property
    def name(self) -> str:
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
        done = subprocess.run(
            self._words,
            input=notice.document,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=self._timeout_seconds,
            check=False,
        )
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
        request = urllib.request.Request(self._address, notice.document, headers, method="POST")
        try:
            open_directly(request, timeout_seconds=self._timeout_seconds).close()
        except urllib.error.HTTPError as error:
            with error:
                raise ReportError(f"the webhook answered {error.code}") from None
        except OSError as error:
            why = getattr(error, "reason", None) or type(error).__name__
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
            key, delivered = f"{run_prefix(notice.run_id)}/notices/{self._receiver.name}.json", tuple[str, ...]()
            with suppress(ObjectMissing, IntegrityError):  # delivered again rather than never
                delivered = document.decode(self._store.read(key), DeliveredNotices, where=key).delivered
            if notice.key not in delivered:
                self._receiver.receive(notice)
                delivered = (*delivered, notice.key)
                self._store.write(key, document.encode(DeliveredNotices(delivered=delivered)))
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

    def deliver_beside(receiver: Receiver) -> AbstractContextManager[None]:
        def report(error: Exception) -> None:
            why = one_line(f"{type(error).__name__}: {error}", 200)
            say(f"notify.{receiver.name} is tried again later, training goes on: {why}")

        delivery = NoticeDelivery(store, receiver)
        return repeating_beside(lambda _: delivery.deliver(find()), report, name=f"{receiver.name}-notices", **times)

    with ExitStack() as threads:
        for receiver in receivers:
            threads.enter_context(deliver_beside(receiver))
        yield
