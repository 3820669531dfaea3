"""A server of each cloud with a proxy before it that breaks chosen requests."""

from collections.abc import Iterator

import pytest

from cairn.storage.stores.cloud_store import CloudStore
from cairn.storage.stores.object_store import RetryPolicy
from tests.clouds.servers import CloudServer, cloud_server
from tests.s3.fault_proxy import FaultProxy
from tests.storage.builders import no_sleep

QUICK = RetryPolicy(tries=4, sleep=no_sleep)


@pytest.fixture(scope="session", params=["gs", "az"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CloudServer:
    """The server of each cloud."""
    return cloud_server(request.param, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def shared_proxy(server: CloudServer) -> Iterator[FaultProxy]:
    """One proxy for all tests of a server."""
    with FaultProxy(upstream=server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(shared_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """The proxy; nothing breaks until it is aimed."""
    shared_proxy.requests.clear()
    yield shared_proxy
    shared_proxy.aims.clear()


@pytest.fixture
def proxied(server: CloudServer, proxy: FaultProxy) -> CloudServer:
    """The server as it is reached through the proxy."""
    return server.through(proxy.endpoint)


@pytest.fixture
def store(proxied: CloudServer, monkeypatch: pytest.MonkeyPatch) -> CloudStore:
    """An empty store behind the proxy, with small parts and short patience."""
    for name, value in (("PART_BYTES", 64 * 1024), ("_ANSWER_SECONDS", 1), ("_TRANSFER_SECONDS", 1)):
        monkeypatch.setattr(f"cairn.storage.stores.cloud_store.{name}", value)
    return proxied.store(retry_policy=QUICK)


@pytest.fixture
def direct(server: CloudServer, store: CloudStore) -> CloudStore:
    """The same objects, past the proxy."""
    return server.store(store._below)
