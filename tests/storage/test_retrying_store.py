"""Retries: only what is idempotent, only as long as the policy says."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cairn.storage.errors import ObjectMissing, StorageError, StoreRefused, StoreUnavailable
from cairn.storage.stores.object_store import ObjectStore, RetryPolicy, UnfinishedWrite
from cairn.storage.stores.open_store import RetryingStore
from tests.memory_store import MemoryStore
from tests.storage.store_operations import OPERATIONS

ONCE = {"create", "write_stream", "local_path"}


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def policy(self, **limits: Any) -> RetryPolicy:
        return RetryPolicy(sleep=self.sleep, clock=lambda: self.now, random=lambda: 1.0, **limits)


class Failing:
    """Raises the errors one by one, then does as the store below."""

    def __init__(self, *errors: Exception) -> None:
        self.inner = MemoryStore()
        self.inner.write("a/b", b"1")
        self.errors = list(errors)
        self.asked = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def operate(*arguments: Any, **named: Any) -> Any:
            self.asked += 1
            if self.errors:
                raise self.errors.pop(0)
            return getattr(self.inner, name)(*arguments, **named)

        return operate


def away(times: int) -> Any:
    return Failing(*[StoreUnavailable("503")] * times)


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - ONCE))
def test_an_idempotent_operation_is_retried_until_it_succeeds(operation: str) -> None:
    store = away(3)
    OPERATIONS[operation](RetryingStore(store, retry_policy=Clock().policy()), "a/b")
    assert store.asked == 4


@pytest.mark.parametrize("operation", ["create", "write_stream"])
def test_an_operation_that_is_not_idempotent_is_tried_once(operation: str) -> None:
    store = away(1)
    with pytest.raises(StoreUnavailable):
        OPERATIONS[operation](RetryingStore(store, retry_policy=Clock().policy()), "a/b")
    assert store.asked == 1


def test_every_operation_of_a_store_is_offered() -> None:
    offered = {name for name in vars(ObjectStore) if not name.startswith("_")}
    assert offered <= set(vars(RetryingStore))


@pytest.mark.parametrize("error", [StoreRefused("no"), ObjectMissing("none"), StorageError("bad key")])
def test_an_answer_that_will_not_change_passes_at_once(error: StorageError) -> None:
    store: Any = Failing(error)
    with pytest.raises(type(error)):
        RetryingStore(store, retry_policy=Clock().policy()).read("a/b")
    assert store.asked == 1


def test_pauses_double_up_to_the_longest() -> None:
    clock = Clock()
    with pytest.raises(StoreUnavailable):
        RetryingStore(away(99), retry_policy=clock.policy(total_seconds=100)).read("a/b")
    assert clock.slept == [0.2, 0.4, 0.8, 1.6, 3.0]


def test_half_of_a_pause_is_random() -> None:
    clock = Clock()
    policy = RetryPolicy(tries=2, sleep=clock.sleep, clock=lambda: clock.now, random=lambda: 0.0)
    with pytest.raises(StoreUnavailable):
        RetryingStore(away(99), retry_policy=policy).read("a/b")
    assert clock.slept == [0.1]


def test_no_try_begins_after_the_total_time() -> None:
    clock = Clock()
    with pytest.raises(StoreUnavailable):
        RetryingStore(away(99), retry_policy=clock.policy(tries=1000, total_seconds=10)).read("a/b")
    assert clock.now < 10


def test_a_policy_without_a_first_try_is_refused() -> None:
    with pytest.raises(StorageError, match="tries 0"):
        RetryPolicy(tries=0)


def test_a_read_that_breaks_after_its_first_piece_is_not_begun_again() -> None:
    class Breaking(MemoryStore):
        def read_chunks(self, key: str) -> Iterator[bytes]:
            yield b"1"
            raise StoreUnavailable("reset")

    chunks = RetryingStore(Breaking(), retry_policy=Clock().policy()).read_chunks("a/b")
    assert next(chunks) == b"1"
    with pytest.raises(StoreUnavailable):
        next(chunks)


def test_unfinished_writes_are_the_stores_below() -> None:
    left = UnfinishedWrite(key="a/b", bytes=1, age_seconds=0.0, token="t")
    RetryingStore(MemoryStore()).discard(left)
    assert RetryingStore(MemoryStore()).unfinished("a") == []
