"""A proxy that stands before a session's `server`, as fixtures of the folders that have servers."""

from collections.abc import Iterator
from typing import Protocol

import pytest

from tests.s3.fault_proxy import FaultProxy


class Answering(Protocol):
    """A server that answers somewhere."""

    @property
    def endpoint(self) -> str:
        """Where."""


@pytest.fixture(scope="session")
def shared_proxy(server: Answering) -> Iterator[FaultProxy]:
    """One proxy for all tests of a server, as clients take long to make."""
    with FaultProxy(upstream=server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(shared_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """The proxy; nothing breaks until it is aimed."""
    shared_proxy.requests.clear()
    yield shared_proxy
    shared_proxy.aims.clear()
