"""Who is told: a command of this machine, which reads the notice from its standard input, or a webhook (JSON)."""

import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Protocol

from reports.errors import ReportError
from reports.notices.notice import Notice, document_of
from storage.stores.document import encode
from tasks.configuration.settings import NotifyConfig
from tasks.machine.http_request import open_directly


class Receiver(Protocol):
    """Takes one notice; may raise anything and take any time."""

    @property
    def name(self) -> str:
        """What it is, for messages and for the record of what it was told."""
        ...

    def receive(self, notice: Notice) -> None:
        """Pass the notice on; returning says that it arrived."""
        ...


class CommandReceiver:
    """Runs a command for each notice; exit code 0 says that it arrived."""

    name = "command"

    def __init__(self, command: str, timeout_seconds: float) -> None:
        self._words, self._timeout_seconds = shlex.split(command), timeout_seconds

    def receive(self, notice: Notice) -> None:
        """Run the command with the notice as JSON on its standard input; it is killed when its time is over."""
        done = subprocess.run(
            self._words,
            input=encode(document_of(notice)),
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
        request = urllib.request.Request(self._address, encode(document_of(notice)), headers, method="POST")
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
