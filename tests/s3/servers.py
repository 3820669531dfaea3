"""S3 servers for tests, each a child process that ends with the one that started it; one of each kind per process.

`quick` is an emulator for the default suite, `ceph` a real gateway for tests marked s3.
"""

import atexit
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from cairn.storage.stores.s3_bucket import S3Bucket, wait_for
from tests.s3.ceph_server import PROGRAMS

HERE = Path(__file__).parent
BUCKET = "cairn"
_CONNECT_SECONDS = 120.0  # a first request reads certificates: many seconds on a busy machine
CEPH = pytest.param("ceph", marks=pytest.mark.s3)
_STARTED: dict[str, "S3Server"] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Server:
    """Where a server answers and to whom."""

    endpoint: str
    access_key: str
    secret_key: str
    smallest_part_bytes: int = 5 * 1024 * 1024

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """Return the AWS variables that lead here, or through a proxy at `endpoint`, and to nothing else."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def bucket(self, *, endpoint: str = "", name: str = BUCKET) -> S3Bucket:
        """Return a client of the bucket that keeps its way here whatever the environment becomes."""
        with aws_environment(self.environment(endpoint)):
            bucket = S3Bucket(name)
            wait_for(bucket.start_request("connect", "list_buckets", seconds=_CONNECT_SECONDS))
            return bucket


@contextmanager
def aws_environment(variables: dict[str, str]) -> Iterator[None]:
    """Let these be all the variables about AWS and proxies there are."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def s3_server(kind: str, folder: Path) -> S3Server:
    """Return this process's server of that kind, started at the first call; `folder` may hold its state."""
    if kind not in _STARTED:
        _STARTED[kind] = {"quick": _start_quick, "ceph": _start_ceph}[kind](folder)
    return _STARTED[kind]


def _start_quick(folder: Path) -> S3Server:
    if find_spec("moto") is None:
        pytest.skip("moto[server] is not installed")
    return _start("quick_server.py")


def _start_ceph(folder: Path) -> S3Server:
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        pytest.skip(f"no {', '.join(absent)}; `make test-s3` says what to install")
    return _start("ceph_server.py", str(folder / f"ceph-{uuid.uuid4().hex[:8]}"))


def _start(script: str, *arguments: str) -> S3Server:
    process = subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(_stop, process)
    assert process.stdout is not None
    server = S3Server(**json.loads(process.stdout.readline()))
    server.bucket().request("create", "create_bucket")
    return server


def _stop(process: "subprocess.Popen[str]") -> None:
    # Its standard input ends, so it ends; waiting for it is waiting for its daemons too.
    process.communicate(timeout=240)
