"""An object that is read by ranges: how many requests, and what is refused."""

from cairn.storage.stores.object_store import RetryPolicy
from cairn.storage.stores.ranged_read import Fetched, read_range


def test_nothing_is_asked_for_where_nothing_is_wanted() -> None:
    asked = list[int]()

    def fetch(name: str, start: int, etag: str | None = None, size: int = 0) -> Fetched:
        asked.append(start)
        return Fetched(data=b"", etag="e", total_bytes=0)

    assert read_range(RetryPolicy(), fetch, "name", 0, memoryview(bytearray())) == 0
    assert asked == []
