"""The quick world for every test of the protocol."""

from collections.abc import Iterator

import pytest

from tests.protocol.quick_world import quick_world


@pytest.fixture(autouse=True)
def quick() -> Iterator[pytest.MonkeyPatch]:
    """Nobody sleeps, nothing waits for a disk, operations come in one order."""
    with quick_world() as patch:
        yield patch
