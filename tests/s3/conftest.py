"""A server of each kind with a proxy before it that breaks chosen requests."""

import uuid
from collections.abc import Iterator

import pytest

from storage.stores.retry_policy import RetryPolicy
from storage.stores.retrying_store import RetryingStore
from storage.stores.s3_bucket import S3Bucket, Timeouts
from storage.stores.s3_store import S3Store
from tests.s3.fault_proxy import FaultProxy
from tests.s3.servers import CEPH, S3Server, s3_server

PART_BYTES = 5 * 1024 * 1024
QUICK = RetryPolicy(tries=4, first_pause_seconds=0.01, longest_pause_seconds=0.05)
TIMEOUTS = Timeouts(connect_seconds=1.0, answer_seconds=2.0, silence_seconds=2.0)


@pytest.fixture(scope="session", params=["quick", CEPH])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> S3Server:
    """A server of each kind."""
    return s3_server(request.param, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def shared_proxy(server: S3Server) -> Iterator[FaultProxy]:
    """One proxy for all tests of a server, as clients take long to make."""
    with FaultProxy(upstream=server.endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def proxied_bucket(server: S3Server, shared_proxy: FaultProxy) -> S3Bucket:
    """A client that goes through the proxy and waits for two seconds only."""
    return server.bucket(endpoint=shared_proxy.endpoint, timeouts=TIMEOUTS)


@pytest.fixture(scope="session")
def direct_bucket(server: S3Server) -> S3Bucket:
    """A client that goes past the proxy."""
    return server.bucket()


@pytest.fixture
def proxy(shared_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """The proxy; nothing breaks until it is aimed."""
    shared_proxy.requests.clear()
    yield shared_proxy
    shared_proxy.aims.clear()


@pytest.fixture
def bare(proxied_bucket: S3Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """An empty store behind the proxy that repeats pieces, the smallest S3 allows, but no whole operation."""
    monkeypatch.setattr("storage.stores.multipart_upload.PART_BYTES", PART_BYTES)
    return S3Store(proxied_bucket, uuid.uuid4().hex, retry_policy=QUICK)


@pytest.fixture
def store(bare: S3Store) -> RetryingStore:
    """The same with retries, as `open_store` gives it."""
    return RetryingStore(bare, retry_policy=QUICK)


@pytest.fixture
def direct(direct_bucket: S3Bucket, bare: S3Store) -> S3Store:
    """The same objects, past the proxy."""
    return S3Store(direct_bucket, bare._below)
