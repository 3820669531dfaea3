"""The values by which the ranks of one model find each other, without torch, for a launcher.

Those of one machine lie in a folder, a file each that is replaced as a whole: a rank that is killed leaves no half of
one. Those of several machines are in the memory of the first machine's launcher.
"""

import contextlib
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import quote

import msgspec

from cairn.model.training.membership import Members
from cairn.tasks.errors import TaskError
from cairn.tasks.trainer import signed_connection

_MEMBERS, _JOINED = "members", "joined/"
_MOST_RANKS = 1 << 20  # those that join have numbers of their own; what nobody writes takes no memory
_CONNECT_SECONDS = 30.0

Operation = Literal["set", "get", "add", "compare_set", "delete"]


class Request(msgspec.Struct, kw_only=True, frozen=True):
    """A rank's request: an `operation` on a key; `number` is the amount to add."""

    operation: Operation
    key: str
    value: bytes = b""
    expected: bytes = b""
    number: int = 0


class Answer(msgspec.Struct, kw_only=True, frozen=True):
    """The value of a key, or None, and a number: the result of `add`, or 1 for a key that was deleted."""

    value: bytes | None = None
    number: int = 0


def answer_request(request: Request, values: "dict[str, bytes] | FolderValues") -> Answer:
    """Execute a request at once on the values under their keys."""
    key, present = request.key, values.get(request.key)
    match request.operation:
        case "add":
            total = int(present or b"0") + request.number
            values[key] = str(total).encode()
            return Answer(number=total)
        case "delete":
            return Answer(number=int(values.pop(key, None) is not None))
        case "compare_set" if present != request.expected and (present is not None or request.expected):
            return Answer(value=request.expected if present is None else present)
        case "set" | "compare_set":
            values[key] = request.value
    return Answer(value=values.get(key))


class SharedValues(Protocol):
    """Values under keys that several processes share."""

    def ask(self, request: Request) -> Answer:
        """Execute a request at once."""


class ValuesGone(TaskError):
    """The process that has the values does not answer any more."""


class MemoryValues:
    """The values of a process that serves them to others."""

    def __init__(self) -> None:
        self._values, self._lock = dict[str, bytes](), threading.Lock()

    def ask(self, request: Request) -> Answer:
        """Execute a request."""
        with self._lock:
            return answer_request(request, self._values)


class RemoteValues:
    """The values in another process, for several threads; raises `ValuesGone` once they are out of reach."""

    def __init__(self, address: str, secret: bytes, name: object) -> None:
        """Join under a name; raises `TaskError` if that is taken."""
        self._lock = threading.Lock()
        try:  # the first machine's launcher listens before any rank starts
            self._peer = signed_connection.connect(address, secret, timeout_seconds=_CONNECT_SECONDS)
        except (OSError, signed_connection.ConnectionEnded) as error:
            raise ValuesGone(f"{address}: the first machine's launcher does not answer: {error}") from error
        if self.ask(Request(operation="add", key=f"{_JOINED}{name}", number=1)).number > 1:
            self.close()
            raise TaskError(f"rank {name} has joined this attempt already; the next attempt has a place for it")

    def ask(self, request: Request) -> Answer:
        """Execute a request there."""
        try:
            with self._lock:
                self._peer.send(msgspec.msgpack.encode(request))
                return msgspec.msgpack.decode(self._peer.receive(), type=Answer)
        except (OSError, signed_connection.ConnectionEnded) as error:
            raise ValuesGone(f"the first machine's launcher is gone: {error}") from error

    def close(self) -> None:
        """Hang up."""
        self._peer.close()


@contextlib.contextmanager
def serving_rendezvous(
    address: str, secret: bytes, values: MemoryValues, on_gone: Callable[[str], None] = lambda name: None
) -> Iterator[int]:
    """Serve values at HOST:PORT until the block ends, one thread for each connection; yields the port.

    `on_gone` is called with the name of who had joined and has hung up, in order or not.
    """

    def serve(peer: signed_connection.SignedConnection) -> None:
        name = ""
        try:
            while True:
                request = msgspec.msgpack.decode(peer.receive(), type=Request)
                name = name or request.key.removeprefix(_JOINED)
                peer.send(msgspec.msgpack.encode(values.ask(request)))
        finally:
            on_gone(name)

    with signed_connection.listening(address, secret, serve, partial(print, file=sys.stderr, flush=True)) as port:
        yield port


class FolderValues:
    """Values that the processes of one machine share; only what reads before it writes takes the lock."""

    def __init__(self, folder: Path) -> None:
        """Use the folder, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def ask(self, request: Request) -> Answer:
        """Execute a request."""
        if request.operation in ("get", "set"):
            return answer_request(request, self)
        with (self._folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return answer_request(request, self)

    def get(self, key: str) -> bytes | None:
        """Return a value, or None."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def __setitem__(self, key: str, value: bytes) -> None:
        part = self._folder / f".{os.getpid()}-{threading.get_native_id()}"
        part.write_bytes(value)
        part.replace(self._path(key))

    def pop(self, key: str, missing: None) -> bytes | None:
        """Remove a value and return it, or None."""
        value = self.get(key)
        self._path(key).unlink(missing_ok=True)
        return value

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


class WaitingMarks:
    """Which ranks of this machine wait for others, a byte for each in a file that their launcher reads."""

    def __init__(self, path: Path) -> None:
        """Use the file, which is made if need be."""
        with path.open("a+b") as file:
            file.truncate(_MOST_RANKS)
            self._marks = mmap.mmap(file.fileno(), 0)

    def set(self, rank: int, is_waiting: bool) -> None:
        """Show whether a rank waits."""
        self._marks[rank] = is_waiting

    def has(self, rank: int) -> bool:
        """Whether a rank waits."""
        return bool(self._marks[rank])


def get_value(values: SharedValues, key: str) -> bytes | None:
    """Return a value, or None."""
    return values.ask(Request(operation="get", key=key)).value


def set_value(values: SharedValues, key: str, value: bytes) -> None:
    """Store a value over the one before."""
    values.ask(Request(operation="set", key=key, value=value))


def read_members(values: SharedValues) -> Members:
    """Return the members as they were published last."""
    return msgspec.json.decode(get_value(values, _MEMBERS) or b"{}", type=Members)


def change_members(values: SharedValues, change: Callable[[Members], Members]) -> tuple[Members, Members]:
    """Publish the members after a change, which is made again if another process was quicker; return both."""
    while True:
        expected = get_value(values, _MEMBERS) or b""
        before = msgspec.json.decode(expected or b"{}", type=Members)
        after = change(before)
        desired = msgspec.json.encode(after)
        request = Request(operation="compare_set", key=_MEMBERS, value=desired, expected=expected)
        if after == before or values.ask(request).value == desired:
            return before, after
