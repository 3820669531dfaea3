"""Who announces that this machine will be taken away: a file that appears, or the cloud's metadata service.

A service that
does not answer, or answers nonsense, is never a notice and never an error of the run.

Sources: AWS "Spot Instance interruption notices" and "Use the Instance Metadata Service" (IMDSv2; the rebalance
recommendation is no notice and is not asked for); Google Compute Engine "Preemptible VM instances" and "Get maintenance
event notices" (a live migration is no notice).
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

from tasks.attempt.shutdown_signal import ShutdownSignal
from tasks.configuration.settings import PreemptionConfig
from tasks.errors import TaskError

_AWS_VARIABLE, _AWS_ADDRESS = "AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254"
_GCP_VARIABLE, _GCP_HOST = "GCE_METADATA_HOST", "metadata.google.internal"
_AWS_TOKEN_SECONDS = 21600
_AWS_ACTIONS = ("terminate", "stop", "hibernate")
_ANSWER_BYTES = 64 * 1024
_TIMEOUT_SECONDS = 2.0
_TOLD_CHARACTERS = 200


class MetadataSilent(TaskError):
    """A metadata service gave no usable answer: nothing is known, and it is asked again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """Who announced an end, in a word, and what was said, in a sentence."""

    name: str
    detail: str


Source = Callable[[], Announcement | None]
"""Looks once; raises `MetadataSilent` where nothing can be known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    status: int
    body: str
    flavor: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _InstanceAction:
    action: str
    time: str = "an unknown time"


class NoticeFile:
    """A file whose existence is the notice; its first line, if any, is passed on."""

    def __init__(self, path: str) -> None:
        """Watch for `path`."""
        self._path = path

    def __call__(self) -> Announcement | None:
        """Return the announcement once the file is there."""
        if not os.path.exists(self._path):
            return None
        words = [f"notice file {self._path} appeared", _first_line(self._path)]
        return Announcement(name="notice-file", detail=": ".join(filter(None, words)))


class AwsMetadata:
    """The spot interruption notice of EC2's metadata service, version 2: a session token first, then the question."""

    def __init__(self, address: str = _AWS_ADDRESS) -> None:
        """Ask the service at `address`."""
        self._address = address.rstrip("/")
        self._token = ""

    def __call__(self) -> Announcement | None:
        """Return the announcement once there is one; 404 means there is none."""
        answer = self._ask()
        if answer.status == 401:  # the token is too old
            self._token = ""
            answer = self._ask()
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise MetadataSilent(f"AWS metadata service answered {answer.status}")
        try:
            told = msgspec.json.decode(answer.body, type=_InstanceAction)
        except (msgspec.DecodeError, RecursionError) as error:
            raise MetadataSilent(f"AWS metadata service answered nonsense: {error}") from error
        if told.action not in _AWS_ACTIONS:
            return None
        return Announcement(name="aws", detail=f"AWS announced: {told.action} at {told.time[:_TOLD_CHARACTERS]}")

    def _ask(self) -> _Answer:
        if not self._token:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_SECONDS)}
            granted = _answer(f"{self._address}/latest/api/token", lifetime, method="PUT")
            if granted.status != 200:
                raise MetadataSilent(f"AWS metadata service gave no token: {granted.status}")
            self._token = granted.body.strip()
        token = {"X-aws-ec2-metadata-token": self._token}
        return _answer(f"{self._address}/latest/meta-data/spot/instance-action", token)


class GcpMetadata:
    """Preemption and host maintenance as Compute Engine's metadata server tells them."""

    def __init__(self, host: str = _GCP_HOST) -> None:
        """Ask the server at `host`, which may carry a port."""
        self._address = f"http://{host}/computeMetadata/v1/instance"

    def __call__(self) -> Announcement | None:
        """Return the announcement once this instance is being preempted, or ended for its host's maintenance."""
        if self._told("preempted") == "TRUE":
            return Announcement(name="gcp", detail="GCP announced: this instance is being preempted")
        if (event := self._told("maintenance-event")) == "TERMINATE_ON_HOST_MAINTENANCE":
            return Announcement(name="gcp", detail=f"GCP announced: {event}")
        return None

    def _told(self, name: str) -> str:
        answer = _answer(f"{self._address}/{name}", {"Metadata-Flavor": "Google"})
        # Whatever else answers for this name, such as a portal in front of a network, does not say it is Google.
        if answer.status == 404:
            return ""
        if answer.status != 200 or answer.flavor != "Google":
            raise MetadataSilent(f"GCP metadata server: {name}: answered {answer.status}")
        return answer.body.strip()


def notice_sources(config: PreemptionConfig, environment: Mapping[str, str]) -> tuple[Source, ...]:
    """Return the sources `config` names; the environment may move a metadata service, as the clouds' own tools do."""
    sources: list[Source] = []
    if config.notice_file:
        sources.append(NoticeFile(config.notice_file))
    if config.metadata == "aws":
        sources.append(AwsMetadata(environment.get(_AWS_VARIABLE) or _AWS_ADDRESS))
    if config.metadata == "gcp":
        sources.append(GcpMetadata(environment.get(_GCP_VARIABLE) or _GCP_HOST))
    return tuple(sources)


@contextmanager
def announced(
    notice: ShutdownSignal,
    sources: tuple[Source, ...],
    *,
    poll_seconds: float,
    on_problem: Callable[[str], None] = lambda problem: None,
) -> Iterator[None]:
    """Ask every source at once and then every `poll_seconds` while the block runs; give the first announcement, once.

    `on_problem` hears of each silent source, once.
    """
    if not sources:
        yield
        return
    stop = threading.Event()
    poller = threading.Thread(
        target=_poll, args=(notice, sources, stop, poll_seconds, on_problem), name="preemption", daemon=True
    )
    poller.start()
    try:
        yield
    finally:
        stop.set()
        poller.join(2 * _TIMEOUT_SECONDS)  # a service that drips its answer is not waited for


def _poll(
    notice: ShutdownSignal,
    sources: tuple[Source, ...],
    stop: threading.Event,
    poll_seconds: float,
    on_problem: Callable[[str], None],
) -> None:
    silent: set[int] = set()
    while not stop.is_set():
        for number, source in enumerate(sources):
            try:
                found = source()
            except MetadataSilent as problem:
                if number not in silent:
                    on_problem(f"{problem}; no notice can come from there until it answers")
                silent.add(number)
                continue
            if found is not None and not stop.is_set():
                notice.give(found.name, found.detail)
                return
        stop.wait(poll_seconds)


def _answer(url: str, headers: Mapping[str, str], *, method: str = "GET") -> _Answer:
    request = Request(url, headers=dict(headers), method=method)
    opener = build_opener(ProxyHandler({}))  # the service is on the machine itself, never behind a proxy
    try:
        with opener.open(request, timeout=_TIMEOUT_SECONDS) as response:
            body: bytes = response.read(_ANSWER_BYTES)
            flavor = response.headers.get("Metadata-Flavor", "")
            return _Answer(status=response.status, body=body.decode("utf-8", "replace"), flavor=flavor)
    except HTTPError as error:
        with error:
            return _Answer(status=error.code, body="", flavor="")
    except (OSError, HTTPException, ValueError) as error:
        raise MetadataSilent(f"{url}: {error}") from error


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline(_TOLD_CHARACTERS).strip()
    except OSError:
        return ""
