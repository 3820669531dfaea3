"""Does create-if-absent really exclude here? A real race, run before a store is trusted with a run log.

Owns the questions and the verdict, by name of the problem; what the store answers to real requests is the only
evidence it accepts. Refuses to know what kind of store it asks.
"""

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from storage.errors import ObjectMissing, StorageError, StoreRefused, StoreUnavailable, StoreUnsound
from storage.stores.object_store import ObjectStore

_CHOOSE = "no run may be kept there, choose another store"
_NOT_EXCLUSIVE = "so create-if-absent does not exclude"


def probe_store(store: ObjectStore, *, creators: int = 8, rounds: int = 2) -> None:
    """Race `creators` creates of one key for some rounds, then ask one by one for all else the run log needs.

    Raises `StoreUnsound` naming what is wrong. A store that cannot be written raises its own `StoreUnavailable`.
    The probe's objects are deleted again.
    """
    folder = f"probe/{uuid.uuid4().hex}"
    with _deleted(store, f"{folder}/written"):
        store.write(f"{folder}/written", b"written")
        with ThreadPoolExecutor(creators) as pool:
            for number in range(rounds):
                with _deleted(store, key := f"{folder}/race-{number}"):
                    _check_race(store, key, creators, pool)
        if _read(store, f"{folder}/written") != b"written":
            raise _unsound(store, "an object is not there, or is another one, after it was written")
    _check_one_by_one(store, folder)


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
    unclear = {number: answer for number, answer in enumerate(answers) if isinstance(answer, StoreUnavailable)}
    if found is None and not winners and unclear:
        raise next(iter(unclear.values()))
    # An unclear answer may belong to the winner, a clear no may not.
    if found not in {b"%d" % number for number in winners or unclear}:
        raise _unsound(store, f"keeps other bytes than those of the creator it told had won, {_NOT_EXCLUSIVE}")


def _check_answers(store: ObjectStore, answers: list[bool | StoreUnavailable]) -> None:
    won, number = answers.count(True), len(answers)
    if refused := [answer for answer in answers if isinstance(answer, StoreRefused)]:
        raise _unsound(
            store, f"rejects If-None-Match: a plain write succeeded, a create did not ({refused[0]})"
        ) from refused[0]
    if won == number > 1:
        problem = f"ignores If-None-Match: the second create of one key succeeded, as did all {number} racing ones"
        raise _unsound(store, f"{problem}, {_NOT_EXCLUSIVE}")
    if won > 1:
        raise _unsound(store, f"told {won} of {number} racing creators they had won, {_NOT_EXCLUSIVE}")


def _check_one_by_one(store: ObjectStore, folder: str) -> None:
    earlier, later = f"{folder}/1", f"{folder}/2"
    with _deleted(store, earlier, later):
        _check_new(store, later)
        with suppress(StoreUnavailable):
            if store.create(later, b"second") or _read(store, later) != b"first":
                raise _unsound(
                    store, f"ignores If-None-Match: the second create of one key succeeded, {_NOT_EXCLUSIVE}"
                )
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
        raise _unsound(
            store, f"lists names out of order or not fresh: the first in {folder} is {found}, must be {expected}"
        )


def _read(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.read(key)
    except ObjectMissing:
        return None


@contextmanager
def _deleted(store: ObjectStore, *keys: str) -> Iterator[None]:
    try:
        yield
    finally:
        for key in keys:
            with suppress(StorageError):
                store.delete(key)


def _unsound(store: ObjectStore, problem: str) -> StoreUnsound:
    return StoreUnsound(f"{store.url}: {problem}; {_CHOOSE}")
