"""A server of each kind with a proxy before it that breaks chosen requests."""

import asyncio
import uuid

import pytest

from cairn.storage.stores.object_store import RetryPolicy
from cairn.storage.stores.s3_bucket import S3Bucket
from cairn.storage.stores.s3_store import S3Store
from tests.processes.forked_parsers import forked_parsers
from tests.s3.fault_proxy import FaultProxy, proxy, shared_proxy
from tests.s3.servers import CEPH, S3Server, s3_server
from tests.storage.builders import no_sleep

__all__ = ["forked_parsers", "proxy", "shared_proxy"]
QUICK = RetryPolicy(tries=4, sleep=no_sleep)


class MovedClock:
    """An event loop's clock that can be moved on, so that nobody waits for a time limit."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.true_time, self.moved_seconds = loop, loop.time, 0.0
        loop.time = lambda: self.true_time() + self.moved_seconds  # type: ignore[method-assign]

    def pass_patience(self) -> None:
        """Let an hour pass: every time limit of a request that is under way ends."""
        self.moved_seconds += 3600.0
        self.loop.call_soon_threadsafe(lambda: None)


@pytest.fixture(scope="session", params=["quick", CEPH])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> S3Server:
    """A server of each kind."""
    return s3_server(request.param, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def proxied_bucket(server: S3Server, shared_proxy: FaultProxy) -> S3Bucket:
    """A client that goes through the proxy; where no answer ever comes, its whole patience has passed at once."""
    bucket = server.bucket(endpoint=shared_proxy.endpoint)
    shared_proxy.on_hang = MovedClock(bucket._loop()).pass_patience
    return bucket


@pytest.fixture(scope="session")
def direct_bucket(server: S3Server) -> S3Bucket:
    """A client that goes past the proxy."""
    return server.bucket()


@pytest.fixture
def part_bytes(server: S3Server) -> int:
    """The size of a part: the smallest that the server allows."""
    return server.smallest_part_bytes


@pytest.fixture
def store(proxied_bucket: S3Bucket, proxy: FaultProxy, part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """An empty store behind the proxy."""
    monkeypatch.setattr("cairn.storage.stores.s3_store.PART_BYTES", part_bytes)
    return S3Store(proxied_bucket, uuid.uuid4().hex, retry_policy=QUICK)


@pytest.fixture
def direct(direct_bucket: S3Bucket, store: S3Store) -> S3Store:
    """The same objects, past the proxy."""
    return S3Store(direct_bucket, store._below)
