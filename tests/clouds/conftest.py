"""A server of each cloud with a proxy before it that breaks chosen requests."""

import pytest

from cairn.storage.stores.cloud_store import CloudStore
from cairn.storage.stores.object_store import RetryPolicy
from tests.clouds.servers import CloudServer, cloud_server
from tests.s3.fault_proxy import FaultProxy, proxy, shared_proxy
from tests.storage.builders import no_sleep

__all__ = ["proxy", "shared_proxy"]
QUICK = RetryPolicy(tries=4, sleep=no_sleep)


@pytest.fixture(scope="session", params=["gs", "az"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CloudServer:
    """The server of each cloud."""
    return cloud_server(request.param, tmp_path_factory.getbasetemp())


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
