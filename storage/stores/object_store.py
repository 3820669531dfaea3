"""The interface of an object store, and objects of known size and SHA-256, whose bytes are checked before their use.

Keys are relative and `/`-separated; what has another name is never touched. Retries have exponential back-off and
jitter (Brooker 2015); libraries for them log the call's arguments, which are data here.
"""

import hashlib
import random
import re
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from cairn.storage import errors
from cairn.storage.stores.regular_file import open_file

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
_ASKED_AT_ONCE = 32
# A file system takes 255 bytes a name, and a temporary name is 34 longer than its object's; S3 takes 1024 a key.
_MAX_SEGMENT_CHARACTERS = 200
_MAX_KEY_CHARACTERS = 800
NAME_RULE = f"letters, digits and _ . = + -, beginning with a letter, a digit or _, at most {_MAX_SEGMENT_CHARACTERS}"
_SEGMENT = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.@=+-]{{0,{_MAX_SEGMENT_CHARACTERS - 1}}}\Z")
MAX_READ_BYTES = 64 * 1024 * 1024
READ_CHUNK_BYTES = 8 * 1024 * 1024
PART_BYTES = 16 * 1024 * 1024
PAGE_BYTES = 4096
"""Chunks of whole pages, at a multiple of it in memory and object, are written without a copy where a store can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedWrite:
    """A temporary file, or the parts of an upload; `token` is the store's name for it, `age_seconds` by its clock."""

    key: str
    bytes: int
    age_seconds: float
    token: str


class ObjectStore(Protocol):
    """Immutable objects below one root, with an atomic create-if-absent.

    Every method raises StoreUnavailable if the store gives no clear answer, and StoreRefused if it refuses, so that a
    retry cannot help. A store that inherits has no unfinished writes and no local files, unless it says otherwise.
    """

    @property
    def url(self) -> str:
        """The store's URL, without credentials."""

    def read(self, key: str, *, at_most_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return the object's bytes; raises ObjectMissing, or IntegrityError for a larger object."""

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Yield the object's bytes in chunks of a few MB; the first chunk raises ObjectMissing."""

    def read_range(self, key: str, start: int, into: memoryview) -> int:
        """Fill `into` with the object's bytes from `start`; returns how many there were. Raises ObjectMissing."""

    def create(self, key: str, data: bytes) -> bool:
        """Create the object if it is absent; returns False if it exists."""

    def write(self, key: str, data: bytes) -> None:
        """Create or overwrite the object; for objects that are no record, such as heartbeats and caches."""

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write chunks as one object, visible only after the last one; returns its bytes."""

    def keys(self, prefix: str) -> list[str]:
        """Return all keys below the folder `prefix`, sorted."""

    def folders(self, prefix: str) -> list[str]:
        """Return the folders directly below the folder `prefix`, sorted; their objects are not listed."""

    def first(self, prefix: str) -> str | None:
        """Return the smallest key directly below the folder `prefix`, in one request where the store can."""

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None if it is absent."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size in bytes of every object below the folder `prefix`, by key, sorted."""
        return {key: size for key in self.keys(prefix) if (size := self.size(key)) is not None}

    def age_seconds(self, key: str) -> float | None:
        """Return the seconds since the object was written, by the store's clock alone; None if that is not known."""
        check_key(key)
        return None

    def delete(self, key: str) -> None:
        """Delete the object if it exists."""

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete these objects, in any order; on an error some of them are deleted."""
        for key in keys:
            self.delete(key)

    def unfinished(self, prefix: str) -> list[UnfinishedWrite]:
        """Return the incomplete writes below the folder `prefix`, of living and dead writers, sorted."""
        check_key(prefix)
        return []

    def discard(self, write: UnfinishedWrite) -> None:
        """Delete an unfinished write if it still exists; an object that it has become stays."""
        check_key(write.key)

    def reserve(self) -> None:
        """Set room aside that `create` uses when the store is full, where that is possible."""
        return

    def local_path(self, key: str) -> Path | None:
        """Return the object's file if the store is a local disk, else None."""
        check_key(key)
        return None


@cache
def advice() -> Mapping[str, Mapping[str, str]]:
    """Return the texts for errors that a retry cannot mend, by kind of store and the store's own words."""
    return tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))


def check_key(key: str) -> str:
    """Return the key unchanged; raises StorageError if it could leave the store's root or is too long."""
    if not all(map(_SEGMENT.match, key.split("/"))):
        raise errors.StorageError(f"key {_shorten(key)}: each part between '/' must be {NAME_RULE} (no '..')")
    if len(key) > _MAX_KEY_CHARACTERS:
        raise errors.StorageError(
            f"key {_shorten(key)}: at most {_MAX_KEY_CHARACTERS} characters; choose a shorter name"
        )
    return key


def check_name(what: str, name: str) -> str:
    """Return the name of a run or alias unchanged; raises StorageError for one that is no part of a key."""
    if "@" in name:
        rule = "must not contain '@', which stands between run and step in RUN@STEP"
        raise errors.StorageError(f"{what} {name!r}: {rule}; name it without a step, or choose another")
    if not _SEGMENT.match(name):
        raise errors.StorageError(f"{what} {_shorten(name)}: must be {NAME_RULE}; choose another name")
    return name


def is_key(name: str) -> bool:
    """Whether a listed name can be the key of an object or folder."""
    with suppress(errors.StorageError):
        return bool(check_key(name))
    return False


def ask_each(store: ObjectStore, ask: Callable[[Item], T], items: Iterable[Item]) -> Iterator[T]:
    """Yield what `ask` returns for each item, in order; a remote store is asked for several at once."""
    if store.local_path("runs") is not None:
        yield from map(ask, items)
        return
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as readers:
        yield from readers.map(ask, items)


def map_ahead(pool: Executor, function: Callable[[Item], T], items: Iterable[Item], *, most: int) -> Iterator[T]:
    """Yield what `function` returns in the pool for each item, in order, `most` ahead of the reader."""
    waiting = deque[Future[T]]()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def too_large(where: str, at_most: int) -> errors.IntegrityError:
    """Return the error for an object above its reader's limit in bytes."""
    problem = f"more than the {at_most:,} bytes that are read"
    return errors.IntegrityError(f"{where}: {problem}; Cairn writes no such object here")


def _shorten(key: str) -> str:
    return repr(key) if len(key) <= _MAX_SEGMENT_CHARACTERS else f"{key[:60]!r}… ({len(key):,} characters)"


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenObject:
    """Size and hex SHA-256 of the bytes that were written."""

    bytes: int
    sha256: str

    def has_bytes_of(self, other: "WrittenObject") -> bool:
        """Whether size and digest are those of the other one."""
        return (self.bytes, self.sha256) == (other.bytes, other.sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedObject(WrittenObject):
    """Key, size and hex SHA-256 that a manifest records for an object."""

    key: str


def check_object(store: ObjectStore, expected: ExpectedObject) -> None:
    """Read the whole object; raises ObjectDamaged if it is missing or different."""
    for _ in _verified_chunks(store, expected):
        pass


def find_damage(store: ObjectStore, expected: ExpectedObject) -> errors.ObjectDamaged | None:
    """Read the whole object; returns what is wrong with it, or None."""
    try:
        check_object(store, expected)
    except errors.ObjectDamaged as damage:
        return damage
    return None


def read_verified(store: ObjectStore, expected: ExpectedObject) -> memoryview:
    """Return the object's bytes in one buffer; raises ObjectDamaged if it is missing or different."""
    if expected.bytes > MAX_READ_BYTES and (found := store.size(expected.key)) != expected.bytes:
        raise _wrong_size(expected, f"{found or 0} bytes")  # before memory is allocated for it
    buffer, position = memoryview(bytearray(expected.bytes)), 0
    for chunk in _verified_chunks(store, expected):
        buffer[position : position + len(chunk)] = chunk
        position += len(chunk)
    return buffer.toreadonly()


def save_verified(store: ObjectStore, expected: ExpectedObject, path: Path) -> None:
    """Copy the object into a new file; the file is valid only after this returns."""
    with path.open("xb") as file:
        for chunk in _verified_chunks(store, expected):
            file.write(chunk)


def write_hashed(store: ObjectStore, key: str, chunks: Iterable[bytes | memoryview]) -> WrittenObject:
    """Write chunks as one object; returns size and digest of what was sent."""
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            digest.update(chunk)
            yield chunk

    size_bytes = store.write_stream(key, hashed())
    return WrittenObject(bytes=size_bytes, sha256=digest.hexdigest())


def describe_file(path: Path) -> WrittenObject:
    """Return a file's size and SHA-256; raises OSError."""
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return WrittenObject(bytes=file.tell(), sha256=digest.hexdigest())


def _verified_chunks(store: ObjectStore, expected: ExpectedObject) -> Iterator[bytes]:
    digest, size_bytes = hashlib.sha256(), 0
    try:
        for chunk in store.read_chunks(expected.key):
            size_bytes += len(chunk)
            if size_bytes > expected.bytes:
                raise _wrong_size(expected, f"{size_bytes} bytes or more")
            digest.update(chunk)
            yield chunk
    except errors.ObjectMissing as missing:
        raise _wrong_size(expected, "missing") from missing
    if size_bytes != expected.bytes:
        raise _wrong_size(expected, f"{size_bytes} bytes")
    if digest.hexdigest() != expected.sha256:
        raise errors.ObjectDamaged(expected.key, expected=expected.sha256, found=f"sha256 is {digest.hexdigest()}")


def _wrong_size(expected: ExpectedObject, found: str) -> errors.ObjectDamaged:
    return errors.ObjectDamaged(expected.key, expected=f"{expected.bytes} bytes", found=found)


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """At most `tries` tries; none begins after `total_seconds`. `on_retry` gets the error and the seconds so far."""

    tries: int = 6
    total_seconds: float = 10.0
    first_pause_seconds: float = 0.2
    longest_pause_seconds: float = 3.0
    on_retry: Callable[[errors.StorageError, float], None] = lambda error, seconds: None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random

    def call(self, operation: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Return the operation's result; the operation must be idempotent. Raises as `attempts` does."""
        for attempt in self.attempts():
            with attempt:
                return operation(*arguments, **named)
        raise AssertionError("the last try returns or raises")

    def attempts(self) -> Iterator[AbstractContextManager[None, bool | None]]:
        """Yield a block for each try, which suppresses an error that is retried; a block that succeeds is the last.

        Retries StoreUnavailable (but not StoreRefused) and AppendUnknown (but not NotDurable), because appends are
        idempotent by write_id. The last try's error is raised.
        """
        began = self.clock()
        for number in range(self.tries):
            pauses = list[float]()
            yield self._attempt(number, began, pauses)
            if not pauses:
                return
            self.sleep(pauses[0])

    @contextmanager
    def _attempt(self, number: int, began: float, pauses: list[float]) -> Iterator[None]:
        try:
            yield
        except (errors.StoreRefused, errors.NotDurable):
            raise
        except (errors.StoreUnavailable, errors.AppendUnknown) as error:
            doubled_seconds = self.first_pause_seconds * 2.0 ** min(number, 30)
            pause_seconds = min(self.longest_pause_seconds, doubled_seconds) * (1 + self.random()) / 2
            elapsed_seconds = self.clock() - began
            if elapsed_seconds + pause_seconds >= self.total_seconds or number == self.tries - 1:
                raise
            self.on_retry(error, elapsed_seconds)
            pauses.append(pause_seconds)


def run_retry_policy(total_seconds: float, say: Callable[[str], None] = lambda message: None) -> RetryPolicy:
    """Return the policy of a run that waits `total_seconds` for its store and prints each retry with `say`."""

    def tell(error: errors.StorageError, seconds: float) -> None:
        say(f"  the store has not answered for {seconds:.0f} s, trying again: {error}")

    # The time limit ends the retries, not the count.
    return RetryPolicy(
        tries=1_000_000, total_seconds=total_seconds, first_pause_seconds=0.5, longest_pause_seconds=15.0, on_retry=tell
    )
