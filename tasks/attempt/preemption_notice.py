"""Preemption notices from a file or a cloud's metadata service, and why Kubernetes ended a pod.

Sources: AWS "Spot Instance interruption notices" and "Use the Instance Metadata Service" (the rebalance recommendation
is no notice); Google "Preemptible VM instances" and "Get maintenance event notices" (a live migration is no notice);
Azure "Scheduled Events for Linux VMs" (a freeze is no notice).
"""

import math
import os
import re
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from typing import TypeVar
from urllib.error import HTTPError
from urllib.request import Request

import msgspec

from cairn.storage.stores.regular_file import open_file, read_file
from cairn.tasks.attempt.shutdown_signal import ShutdownSignal
from cairn.tasks.configuration.settings import PreemptionConfig
from cairn.tasks.errors import TaskError
from cairn.tasks.machine.http_request import open_directly
from cairn.tasks.machine.process_scopes import running_beside

_AWS_ADDRESS = _AZURE_ADDRESS = "http://169.254.169.254"
_GCP_HOST, _FLAVOR = "metadata.google.internal", "Metadata-Flavor"
_AZURE_ENDS = frozenset({"Preempt", "Terminate", "Redeploy", "Reboot"})
_TIMEOUT_SECONDS = 2.0
_DETAIL_BYTES = 200


T = TypeVar("T")


class MetadataUnavailable(TaskError):
    """A metadata service gave no usable answer; it is polled again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionNotice:
    """The source of a notice, in a word, and its content, in a sentence."""

    name: str
    detail: str


NoticeSource = Callable[[], PreemptionNotice | None]
"""Polls once; raises `MetadataUnavailable` without a usable answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _InstanceAction:
    action: str
    time: str = "an unknown time"


class _AzureEvent(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: tuple[str, ...] = ()
    not_before: str = ""


class _AzureEvents(msgspec.Struct, rename="pascal"):
    events: tuple[_AzureEvent, ...]


def read_notice_file(path: str) -> PreemptionNotice | None:
    """Return the notice once the file exists; its first line is the detail."""
    if not os.path.exists(path):
        return None
    words = [f"notice file {path} appeared"]
    with suppress(OSError), open_file(path) as file:
        words.append(file.readline(_DETAIL_BYTES).decode(errors="replace").strip())
    return PreemptionNotice(name="notice-file", detail=": ".join(filter(None, words)))


def read_aws_notice(address: str = _AWS_ADDRESS) -> PreemptionNotice | None:
    """Return the spot interruption notice of EC2's metadata service, version 2, which needs a session token."""
    service, base = "AWS metadata service", f"{address.rstrip('/')}/latest"
    granted = _ask(service, f"{base}/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT") or ""
    token = {"X-aws-ec2-metadata-token": granted.strip()}
    body = _ask(service, f"{base}/meta-data/spot/instance-action", token, is_optional=True)
    found = None if body is None else _decode(service, body, _InstanceAction)
    if found is None or found.action not in ("terminate", "stop", "hibernate"):
        return None
    return PreemptionNotice(name="aws", detail=f"AWS announced: {found.action} at {found.time[:_DETAIL_BYTES]}")


def read_gcp_notice(host: str = _GCP_HOST) -> PreemptionNotice | None:
    """Return the notice at `host` (with port or not): the instance is preempted, or ended to maintain its host."""
    ends = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
    for name, end in ends.items():
        url = f"http://{host}/computeMetadata/v1/instance/{name}"
        found = _ask(f"GCP metadata server: {name}:", url, {_FLAVOR: "Google"}, is_optional=True)
        if found is not None and found.strip() == end:
            detail = "this instance is being preempted" if end == "TRUE" else end
            return PreemptionNotice(name="gcp", detail=f"GCP announced: {detail}")
    return None


def read_azure_notice(address: str = _AZURE_ADDRESS) -> PreemptionNotice | None:
    """Return the first scheduled event that ends this machine; those of others in its set are told here too."""
    service, base, headers = "Azure metadata service", f"{address.rstrip('/')}/metadata", {"Metadata": "true"}
    body = _ask(service, f"{base}/scheduledevents?api-version=2020-07-01", headers) or ""
    for event in _decode(service, body, _AzureEvents).events:
        if event.event_type in _AZURE_ENDS:
            own = _ask(service, f"{base}/instance/compute/name?api-version=2021-02-01&format=text", headers) or ""
            if own.strip() in event.resources:
                detail = f"Azure announced: {event.event_type} at {event.not_before or 'an unknown time'}"
                return PreemptionNotice(name="azure", detail=detail[:_DETAIL_BYTES])
    return None


def _decode(service: str, body: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MetadataUnavailable(f"{service} gave an unreadable answer: {error}") from error


def _ask(
    service: str, url: str, headers: Mapping[str, str], *, method: str = "GET", is_optional: bool = False
) -> str | None:
    """Return the body of a good answer; None for 404 where that `is_optional`, so that there is no notice."""
    request = Request(url, headers=dict(headers), method=method)
    try:  # the service is on this machine, never behind a proxy
        with open_directly(request, timeout_seconds=_TIMEOUT_SECONDS, proxies=False) as response:
            body: bytes = response.read(64 * 1024)
            # Another server under Google's name, such as a captive portal, does not send its header.
            is_real = _FLAVOR not in headers or response.headers.get(_FLAVOR) == headers[_FLAVOR]
            if response.status == 200 and is_real:
                return body.decode("utf-8", "replace")
            status = response.status
    except HTTPError as error:
        with error:
            status = error.code
    except (OSError, HTTPException, ValueError) as error:
        raise MetadataUnavailable(f"{url}: {error}") from error
    if status == 404 and is_optional:
        return None
    raise MetadataUnavailable(f"{service} answered {status}")


def notice_sources(config: PreemptionConfig, environment: Mapping[str, str]) -> tuple[NoticeSource, ...]:
    """Return the sources that `config` names; environment variables of the clouds' tools may move a service."""
    services: dict[str, NoticeSource] = {
        "aws": partial(read_aws_notice, environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _AWS_ADDRESS),
        "azure": partial(read_azure_notice, environment.get("AZURE_POD_IDENTITY_AUTHORITY_HOST") or _AZURE_ADDRESS),
        "gcp": partial(read_gcp_notice, environment.get("GCE_METADATA_HOST") or _GCP_HOST),
    }
    file = [partial(read_notice_file, config.notice_file)] if config.notice_file else []
    return (*file, *(service for name, service in services.items() if name == config.metadata))


def polling_notices(
    shutdown: ShutdownSignal, sources: Sequence[NoticeSource], *, poll_seconds: float, on_problem: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Poll the sources in the block until a notice requests the shutdown; `on_problem` gets a source's failure once."""
    unavailable: set[NoticeSource] = set()

    def poll(stop: threading.Event) -> None:
        while not stop.is_set():
            for source in sources:
                try:
                    found = source()
                except MetadataUnavailable as problem:
                    if source not in unavailable:
                        on_problem(f"{problem}; no notice comes from there until it answers")
                    unavailable.add(source)
                    continue
                if found is not None and not stop.is_set():
                    shutdown.request(found.name, found.detail)
                    return
            stop.wait(poll_seconds)

    # A service may send its answer for longer than the timeout.
    return running_beside(poll, name="preemption", join_seconds=2 * _TIMEOUT_SECONDS) if sources else nullcontext()


def kubernetes_reason(environment: Mapping[str, str], host: str) -> str:
    """Return why Kubernetes ended the pod of this host name (`OOMKilled`, `Evicted`, …), or "" if unknown.

    A pod cannot read it of another by itself: an init container that may ask the API (`deployments/kubernetes/
    ended_pods.py`) writes a line `HOST REASON` for each ended pod, oldest first, to the file CAIRN_ENDED_PODS.
    """
    try:
        lines = read_file(environment.get("CAIRN_ENDED_PODS", "")).decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((words[1] for words in map(str.split, reversed(lines)) if len(words) == 2 and words[0] == host), "")


def is_cancelled_in_slurm(environment: Mapping[str, str]) -> bool:
    """Whether this process belongs to a job that was ended by `scancel`; False if Slurm does not answer.

    Slurm sends the same signal before a preemption, a requeue and a time limit (`scontrol show job` of Slurm 22.05,
    observed after each of the four).
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        return False
    command = ["scontrol", "--oneliner", "show", "job", job]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return is_cancelled(shown)


def is_cancelled(shown: str) -> bool:
    """Whether `scontrol show job` describes a job that `scancel` ended."""
    # While it ends, it is only COMPLETING; but it was not preempted, has run (a job that is queued again has not, by
    # its new start) and is not out of time.
    words = dict(word.split("=", 1) for word in shown.split() if "=" in word)
    state = words.get("JobState", "")
    if state.startswith("CANCELLED"):
        return True
    if state != "COMPLETING" or words.get("PreemptTime", "None") != "None":
        return False
    return 0 < _seconds(words.get("RunTime", "")) < (_seconds(words.get("TimeLimit", "")) or math.inf)


def _seconds(duration: str) -> int:
    """Return the seconds of [days-]hours:minutes:seconds, 0 for anything else, such as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", duration)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
