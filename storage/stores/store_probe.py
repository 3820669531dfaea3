"""Tests a store by real requests before it keeps a run log: create-if-absent must exclude, lists must be ordered."""

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from storage.errors import ObjectMissing, StorageError, StoreRefused, StoreUnavailable, StoreUnsound
from storage.stores.object_store import ObjectStore

_SECOND_SUCCEEDED = "ignores If-None-Match: the second create of one key succeeded"
_NOT_EXCLUSIVE = "so create-if-absent does not exclude"


def probe_store(store: ObjectStore, *, creators: int = 8, rounds: int = 2) -> None:
    """Race `creators` creates of one key for some rounds, then check one by one what else the run log needs.

    Deletes its objects. Raises StoreUnsound naming the problem, or StoreUnavailable if the store cannot be written.
    """
    folder = f"probe/{uuid.uuid4().hex}"
    with _delete_afterwards(store, f"{folder}/written"):
        store.write(f"{folder}/written", b"written")
        with ThreadPoolExecutor(creators) as pool:
            for number in range(rounds):
                with _delete_afterwards(store, key := f"{folder}/race-{number}"):
                    _check_race(store, key, creators, pool)
        if _read(store, f"{folder}/written") != b"written":
            raise _unsound(store, "an object is not there, or is another one, after it was written")
    _check_single_requests(store, folder)


def _check_race(store: ObjectStore, key: str, creators: int, pool: ThreadPoolExecutor) -> None:
    barrier = threading.Barrier(creators)

    def create(number: int) -> bool | StoreUnavailable:
        barrier.wait()
        try:
            return store.create(key, b"%d" % number)
        except StoreUnavailable as error:
            return error

    answers = list(pool.map(create, range(creators)))
    _check_answers(store, answers)
    found = _read(store, key)
    winners = [number for number, answer in enumerate(answers) if answer is True]
    unknown = {number: answer for number, answer in enumerate(answers) if isinstance(answer, StoreUnavailable)}
    if found is None and not winners and unknown:
        raise next(iter(unknown.values()))
    # A creator whose answer is unknown may have won; a creator that got False has not.
    if found not in {b"%d" % number for number in winners or unknown}:
        raise _unsound(store, f"keeps other bytes than the winning creator's, {_NOT_EXCLUSIVE}")


def _check_answers(store: ObjectStore, answers: list[bool | StoreUnavailable]) -> None:
    won, number = answers.count(True), len(answers)
    for refused in (answer for answer in answers if isinstance(answer, StoreRefused)):
        problem = f"rejects If-None-Match: a plain write succeeded, a create did not ({refused})"
        raise _unsound(store, problem) from refused
    if won == number > 1:
        raise _unsound(store, f"{_SECOND_SUCCEEDED}, as did all {number} racing ones, {_NOT_EXCLUSIVE}")
    if won > 1:
        raise _unsound(store, f"told {won} of {number} racing creators they had won, {_NOT_EXCLUSIVE}")


def _check_single_requests(store: ObjectStore, folder: str) -> None:
    earlier, later = f"{folder}/1", f"{folder}/2"
    with _delete_afterwards(store, earlier, later):
        _check_new(store, later)
        with suppress(StoreUnavailable):
            if store.create(later, b"second") or _read(store, later) != b"first":
                raise _unsound(store, f"{_SECOND_SUCCEEDED}, {_NOT_EXCLUSIVE}")
        _check_first(store, folder, later)
        _check_new(store, earlier)
        _check_first(store, folder, earlier)


def _check_new(store: ObjectStore, key: str) -> None:
    try:
        store.create(key, b"first")
    except StoreUnavailable:
        if _read(store, key) is None:
            raise
    if _read(store, key) != b"first":
        raise _unsound(store, "an object is not there, or is another one, right after it was created")


def _check_first(store: ObjectStore, folder: str, expected: str) -> None:
    if (found := store.first(folder)) != expected:
        problem = f"lists names out of order or not fresh: the first in {folder} is {found}, must be {expected}"
        raise _unsound(store, problem)


def _read(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.read(key)
    except ObjectMissing:
        return None


@contextmanager
def _delete_afterwards(store: ObjectStore, *keys: str) -> Iterator[None]:
    try:
        yield
    finally:
        for key in keys:
            with suppress(StorageError):
                store.delete(key)


def _unsound(store: ObjectStore, problem: str) -> StoreUnsound:
    return StoreUnsound(f"{store.url}: {problem}; no run may be kept there, choose another store")
