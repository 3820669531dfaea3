"""A store that is away is given up in seconds, by the command as by the store; a bad server is refused."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.storage.errors import StoreUnavailable, StoreUnsound
from cairn.storage.stores.object_store import RetryPolicy
from cairn.storage.stores.s3_bucket import S3Bucket
from cairn.storage.stores.s3_store import S3Store
from cairn.storage.stores.store_probe import probe_store
from tests.commands import ROOT, Ended, run_here
from tests.processes.waiting import wait_for
from tests.s3.ceph_server import free_ports
from tests.s3.fault_proxy import FaultProxy, NetworkFault
from tests.s3.servers import S3Server, aws_environment
from tests.storage.builders import no_sleep

NOWHERE = S3Server(endpoint="http://127.0.0.1:9", access_key="test", secret_key="canary-of-a-secret")


@pytest.fixture
def deaf() -> Iterator[str]:
    """An endpoint whose connections are never accepted, as behind a firewall that drops."""
    with socket.socket() as listener, socket.socket() as filling:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        filling.connect(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def status_of_a_run(folder: Path, endpoint: str) -> Ended:
    """Run `cairn status` of a run in a bucket there."""
    return run_here(("status", "r1", "--store", "s3://cairn/x"), folder, NOWHERE.environment(endpoint))


def test_status_gives_up_an_endpoint_nobody_listens_at(tmp_path: Path) -> None:
    ended = status_of_a_run(tmp_path, f"http://127.0.0.1:{free_ports(1)[0]}")
    assert (ended.code != 0, "cannot" in ended.err, "canary" in ended.err) == (True, True, False)


@pytest.mark.slow
def test_status_gives_up_an_endpoint_that_accepts_nobody(deaf: str, tmp_path: Path) -> None:
    ended = status_of_a_run(tmp_path, deaf)
    assert (ended.code != 0, "cannot" in ended.err) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [NetworkFault.SLOW_DOWN, NetworkFault.HANG], ids=lambda fault: fault.name)
def test_status_gives_up_a_server_that_only_says_503_or_nothing(fault: NetworkFault, tmp_path: Path) -> None:
    with FaultProxy(upstream="http://127.0.0.1:9") as proxy:
        proxy.aim(fault, ".*", times=1_000_000)
        ended = status_of_a_run(tmp_path, proxy.endpoint)
    assert (ended.code != 0, "cannot" in ended.err) == (True, True)
    assert len(proxy.requests) <= 15


def test_the_error_names_the_store_and_what_was_tried() -> None:
    with (
        aws_environment(NOWHERE.environment()),
        pytest.raises(StoreUnavailable, match=r"s3://cairn/x/a/?: cannot list"),
    ):
        S3Store(S3Bucket("cairn"), "x", retry_policy=RetryPolicy(tries=2, sleep=no_sleep)).keys("a")


def is_served(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def rclone(tmp_path: Path) -> Iterator[S3Server]:
    """A real server that knows no conditions; skips where rclone is not installed."""
    program = shutil.which("rclone")
    if program is None:
        pytest.skip("rclone is not installed")
    (tmp_path / "served" / "cairn").mkdir(parents=True)
    port = free_ports(1)[0]
    options = ["--addr", f"127.0.0.1:{port}", "--auth-key", "test,testsecret", "--config", os.devnull]
    process = subprocess.Popen(
        [program, "serve", "s3", str(tmp_path / "served"), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: is_served(port), process, "rclone listens")
    yield S3Server(endpoint=f"http://127.0.0.1:{port}", access_key="test", secret_key="testsecret")
    process.kill()
    process.wait()


@pytest.mark.s3
def test_a_real_server_without_conditions_is_refused_by_name(rclone: S3Server) -> None:
    with pytest.raises(StoreUnsound, match=r"If-None-Match|had won"):
        probe_store(S3Store(rclone.bucket(), "x"))


@pytest.mark.slow  # quick witness: tests/s3/servers.py, which reads that line before every test on the emulator
def test_the_quick_server_says_where_it_is_as_json() -> None:
    script = ROOT / "tests" / "s3" / "quick_server.py"
    done = subprocess.run(
        [sys.executable, str(script)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240
    )
    assert json.loads(done.stdout)["endpoint"].startswith("http://127.0.0.1:")
