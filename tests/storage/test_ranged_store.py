"""An object that is read by ranges: how many requests, and what is refused."""

from cairn.storage.stores.object_store import RetryPolicy
from cairn.storage.stores.ranged_store import Fetched, RangedStore


class AskedStore(RangedStore):
    """Notes where each range begins that it is asked for."""

    def __init__(self) -> None:
        self._retry_policy, self._below, self.asked = RetryPolicy(), "", list[int]()

    def _fetch_range(self, name: str, start: int, size: int, etag: str | None = None) -> Fetched:
        self.asked.append(start)
        return Fetched(data=b"", etag="e", total_bytes=0)


def test_nothing_is_asked_for_where_nothing_is_wanted() -> None:
    store = AskedStore()
    assert store.read_range("a/b", 0, memoryview(bytearray())) == 0
    assert store.asked == []
