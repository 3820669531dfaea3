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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
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
_GCP_HOST = "metadata.google.internal"
_AZURE_ENDS = frozenset({"Preempt", "Terminate", "Redeploy", "Reboot"})
_TIMEOUT_SECONDS = 2.0
_DETAIL_BYTES = 200


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
    service = f"{address.rstrip('/')}/latest"
    status, granted, _ = _answer(f"{service}/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    if status != 200:
        raise MetadataUnavailable(f"AWS metadata service gave no token: {status}")
    token = {"X-aws-ec2-metadata-token": granted.strip()}
    status, body, _ = _answer(f"{service}/meta-data/spot/instance-action", token)
    if status == 404:  # there is none
        return None
    if status != 200:
        raise MetadataUnavailable(f"AWS metadata service answered {status}")
    try:
        found = msgspec.json.decode(body, type=_InstanceAction)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MetadataUnavailable(f"AWS metadata service gave an unreadable answer: {error}") from error
    if found.action not in ("terminate", "stop", "hibernate"):
        return None
    detail = f"AWS announced: {found.action} at {found.time[:_DETAIL_BYTES]}"
    return PreemptionNotice(name="aws", detail=detail)


def read_gcp_notice(host: str = _GCP_HOST) -> PreemptionNotice | None:
    """Return the notice at `host` (with port or not): the instance is preempted, or ended to maintain its host."""
    if _read_gcp(host, "preempted") == "TRUE":
        return PreemptionNotice(name="gcp", detail="GCP announced: this instance is being preempted")
    if (event := _read_gcp(host, "maintenance-event")) == "TERMINATE_ON_HOST_MAINTENANCE":
        return PreemptionNotice(name="gcp", detail=f"GCP announced: {event}")
    return None


def _read_gcp(host: str, name: str) -> str:
    status, body, flavor = _answer(f"http://{host}/computeMetadata/v1/instance/{name}", {"Metadata-Flavor": "Google"})
    # Another server under this name, such as a captive portal, does not send Google's header.
    if status == 404:
        return ""
    if status != 200 or flavor != "Google":
        raise MetadataUnavailable(f"GCP metadata server: {name}: answered {status}")
    return body.strip()


def read_azure_notice(address: str = _AZURE_ADDRESS) -> PreemptionNotice | None:
    """Return the first scheduled event that ends this machine; those of others in its set are told here too."""
    body = _read_azure(address, "scheduledevents?api-version=2020-07-01")
    try:
        found = msgspec.json.decode(body, type=_AzureEvents)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MetadataUnavailable(f"Azure metadata service gave an unreadable answer: {error}") from error
    ending = [event for event in found.events if event.event_type in _AZURE_ENDS]
    own = _read_azure(address, "instance/compute/name?api-version=2021-02-01&format=text").strip() if ending else ""
    for event in ending:
        if own in event.resources:
            when = event.not_before or "an unknown time"
            return PreemptionNotice(
                name="azure", detail=f"Azure announced: {event.event_type} at {when}"[:_DETAIL_BYTES]
            )
    return None


def _read_azure(address: str, name: str) -> str:
    status, body, _ = _answer(f"{address.rstrip('/')}/metadata/{name}", {"Metadata": "true"})
    if status != 200:
        raise MetadataUnavailable(f"Azure metadata service answered {status}")
    return body


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
    shutdown: ShutdownSignal,
    sources: tuple[NoticeSource, ...],
    *,
    poll_seconds: float,
    on_problem: Callable[[str], None] = lambda problem: None,
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


def _answer(url: str, headers: Mapping[str, str], *, method: str = "GET") -> tuple[int, str, str]:
    """Return status, body and the header that Google's service sends."""
    request = Request(url, headers=dict(headers), method=method)
    try:  # the service is on this machine, never behind a proxy
        with open_directly(request, timeout_seconds=_TIMEOUT_SECONDS, proxies=False) as response:
            body: bytes = response.read(64 * 1024)
            return response.status, body.decode("utf-8", "replace"), response.headers.get("Metadata-Flavor", "")
    except HTTPError as error:
        with error:
            return error.code, "", ""
    except (OSError, HTTPException, ValueError) as error:
        raise MetadataUnavailable(f"{url}: {error}") from error


def _seconds(duration: str) -> int:
    """Return the seconds of [days-]hours:minutes:seconds, 0 for anything else, such as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", duration)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
