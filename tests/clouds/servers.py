"""Servers of other clouds for tests, each a child process that ends with the one that started it; one of a kind each.

`gs` and `az` are fakes of the default suite, `azurite` is Microsoft's emulator for tests marked slow, if it is
installed.
"""

import atexit
import base64
import hashlib
import hmac
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest

from cairn.storage.stores.cloud_store import CloudStore
from cairn.storage.stores.object_store import RetryPolicy
from tests.commands import ROOT
from tests.processes.waiting import wait_for

CLOUDS = ("gs", "az", "azurite")
AZURITE = pytest.param("azurite", marks=pytest.mark.slow)
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account and the key that every emulator has, by its documentation."""
_RETRY_POLICY = RetryPolicy()
_STARTED: dict[str, "CloudServer"] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudServer:
    """A bucket or container, and the variables that lead there."""

    cloud: Literal["gs", "az"]
    bucket: str = "cairn"
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        parts = urlsplit(self.variables.get("GOOGLE_BASE_URL") or self.variables["AZURE_STORAGE_ENDPOINT"])
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def secret(self) -> str:
        """What must never be shown."""
        return self.variables.get("GOOGLE_BEARER_TOKEN") or self.variables["AZURE_STORAGE_ACCOUNT_KEY"]

    def through(self, endpoint: str) -> "CloudServer":
        """Return the server as it is reached through a proxy."""
        moved = {name: value.replace(self.endpoint, endpoint) for name, value in self.variables.items()}
        return replace(self, variables=moved)

    def store(self, prefix: str = "", *, retry_policy: RetryPolicy = _RETRY_POLICY) -> CloudStore:
        """Return a store below a new prefix of the server's bucket."""
        with cloud_environment(self):
            return CloudStore(self.cloud, self.bucket, prefix or uuid.uuid4().hex, retry_policy=retry_policy)


@contextmanager
def cloud_environment(server: CloudServer, **more: str) -> Iterator[None]:
    """Let these be all the variables about clouds and proxies there are."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith("_proxy"):
                patch.delenv(name)
        for name, value in {**server.variables, **more}.items():
            patch.setenv(name, value)
        yield


def cloud_server(kind: str, folder: Path) -> CloudServer:
    """Return this process's server of that kind, started at the first call; `folder` may hold its state."""
    if kind not in _STARTED:
        if find_spec("obstore") is None:
            pytest.skip("obstore is not installed")
        _STARTED[kind] = {"gs": _start_google, "az": _start_azure, "azurite": _start_azurite}[kind](folder)
    return _STARTED[kind]


def _start_google(folder: Path) -> CloudServer:
    endpoint = _start("tests.clouds.google_server")
    request = urllib.request.Request(f"{endpoint}/cairn", method="PUT", headers={"Authorization": "Bearer canary"})
    urllib.request.urlopen(request).close()
    return CloudServer(
        cloud="gs", variables={"GOOGLE_BASE_URL": endpoint, "GOOGLE_BEARER_TOKEN": "canary-token-0123456789"}
    )


def _start_azure(folder: Path) -> CloudServer:
    return CloudServer(cloud="az", variables=_azure_variables(_start("tests.clouds.azure_server")))


def _start_azurite(folder: Path) -> CloudServer:
    if (program := shutil.which("azurite-blob")) is None:
        pytest.skip("no azurite-blob (npm's azurite)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [
        program,
        "--silent",
        "--location",
        str(folder / "azurite"),
        "--blobPort",
        str(port),
        "--skipApiVersionCheck",
    ]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(process.kill)
    server = CloudServer(cloud="az", variables=_azure_variables(f"http://127.0.0.1:{port}"))
    wait_for(lambda: _listens(port), process, "a server")
    _make_container(server)
    return server


def _azure_variables(endpoint: str) -> dict[str, str]:
    address = f"{endpoint}/{_ACCOUNT}"
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
        "AZURE_STORAGE_ENDPOINT": address,
    }


def _make_container(server: CloudServer) -> None:
    """Create the container by a signed request ("Authorize with Shared Key", Microsoft), which the library has not."""
    dated, version = formatdate(usegmt=True), "2021-08-06"
    resource = f"/{_ACCOUNT}/{_ACCOUNT}/{server.bucket}\nrestype:container"
    signed = "\n".join(["PUT", *[""] * 11, f"x-ms-date:{dated}", f"x-ms-version:{version}", resource])
    digest = hmac.new(base64.b64decode(_KEY), signed.encode(), hashlib.sha256).digest()
    headers = {"x-ms-date": dated, "x-ms-version": version, "Content-Length": "0"}
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{server.variables['AZURE_STORAGE_ENDPOINT']}/{server.bucket}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _start(module: str) -> str:
    process = subprocess.Popen(
        [sys.executable, "-m", module], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.communicate)  # its standard input ends, so it ends
    assert process.stdout is not None
    return str(json.loads(process.stdout.readline())["endpoint"])
