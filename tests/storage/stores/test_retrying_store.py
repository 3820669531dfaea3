"""Retries: only what is idempotent, only as long as the policy says."""

from datetime import UTC, datetime
from typing import Any

import pytest

from cairn.storage.errors import IntegrityError, ObjectMissing, StorageError, StoreRefused, StoreUnavailable
from cairn.storage.stores.object_store import RetryPolicy
from cairn.storage.stores.ranged_store import Fetched
from cairn.storage.stores.s3_store import S3Store
from tests.storage.store_operations import OPERATIONS

ONCE = {"create", "local_path"}


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
    """A bucket that raises the errors one by one, and then answers as one with an object of a byte."""

    name = "cairn"

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.asked = 0

    def request(self, action: str, method: str, **parameters: Any) -> dict[str, Any]:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return {"ContentLength": 1, "LastModified": datetime.now(UTC)}

    def fetch(self, key: str, **parameters: Any) -> Fetched:
        self.request("read", "get_object")
        return Fetched(data=b"1", etag="e", total_bytes=1)


def away(times: int) -> Any:
    return Failing(*[StoreUnavailable("503")] * times)


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - ONCE))
def test_an_idempotent_operation_is_retried_until_it_succeeds(operation: str) -> None:
    bucket = away(3)
    OPERATIONS[operation](S3Store(bucket, retry_policy=Clock().policy()), "a/b")
    assert bucket.asked == 4


def test_a_create_is_tried_once() -> None:
    bucket = away(1)
    with pytest.raises(StoreUnavailable):
        S3Store(bucket, retry_policy=Clock().policy()).create("a/b", b"1")
    assert bucket.asked == 1


@pytest.mark.parametrize("error", [StoreRefused("no"), ObjectMissing("none"), StorageError("bad key")])
def test_an_answer_that_will_not_change_passes_at_once(error: StorageError) -> None:
    bucket: Any = Failing(error)
    with pytest.raises(type(error)):
        S3Store(bucket, retry_policy=Clock().policy()).read("a/b")
    assert bucket.asked == 1


def test_pauses_double_up_to_the_longest() -> None:
    clock = Clock()
    with pytest.raises(StoreUnavailable):
        S3Store(away(99), retry_policy=clock.policy(total_seconds=100)).read("a/b")
    assert clock.slept == [0.2, 0.4, 0.8, 1.6, 3.0]


def test_half_of_a_pause_is_random() -> None:
    clock = Clock()
    policy = RetryPolicy(tries=2, sleep=clock.sleep, clock=lambda: clock.now, random=lambda: 0.0)
    with pytest.raises(StoreUnavailable):
        S3Store(away(99), retry_policy=policy).read("a/b")
    assert clock.slept == [0.1]


def test_no_try_begins_after_the_total_time() -> None:
    clock = Clock()
    with pytest.raises(StoreUnavailable):
        S3Store(away(99), retry_policy=clock.policy(tries=1000, total_seconds=10)).read("a/b")
    assert clock.now < 10


def test_nothing_is_asked_for_where_nothing_is_wanted() -> None:
    bucket = away(0)
    assert S3Store(bucket).read_range("a/b", 0, memoryview(bytearray())) == bucket.asked == 0


class Cut:
    """A bucket that gives one byte of whatever range it is asked for."""

    name = "cairn"

    def fetch(self, key: str, **parameters: Any) -> Fetched:
        return Fetched(data=b"1", etag="e", total_bytes=3)


def test_a_range_that_is_shorter_than_the_object_is_no_end_of_it() -> None:
    bucket: Any = Cut()
    with pytest.raises(IntegrityError, match="s3://cairn/a/b: 1 bytes at 1, not 2"):
        list(S3Store(bucket, retry_policy=Clock().policy()).read_chunks("a/b"))
