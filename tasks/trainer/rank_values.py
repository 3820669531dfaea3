"""The values by which the ranks of one model find each other, without torch, for a launcher.

Those of one machine lie in a folder, a file each that is replaced as a whole: a rank that is killed leaves no half of
one. Those of several machines are in the memory of the first machine's launcher.
"""

import contextlib
import fcntl
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import msgspec

from cairn.tasks.trainer import signed_connection

_MEMBERS = "members"
_MOST_RANKS = 4096

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


@contextlib.contextmanager
def serving_rendezvous(address: str, secret: bytes) -> Iterator[int]:
    """Serve at HOST:PORT until the block ends, one thread for each connection; yields the port."""
    values, lock = dict[str, bytes](), threading.Lock()

    def serve(peer: signed_connection.SignedConnection) -> None:
        while True:
            request = msgspec.msgpack.decode(peer.receive(), type=Request)
            with lock:
                answer = answer_request(request, values)
            peer.send(msgspec.msgpack.encode(answer))

    with signed_connection.listening(address, secret, serve, partial(print, file=sys.stderr, flush=True)) as port:
        yield port


class FolderValues:
    """Values that the processes of one machine share; only what reads before it writes takes the lock."""

    def __init__(self, folder: Path) -> None:
        """Use the folder, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        with self.waiting_path.open("ab") as file:
            file.truncate(_MOST_RANKS)

    @property
    def waiting_path(self) -> Path:
        """The file with a byte for each rank, which is not 0 while it waits for others."""
        return self._folder / ".waiting"

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


class Members(msgspec.Struct, kw_only=True, frozen=True):
    """Which ranks train together, and how often that has changed; none once their end has begun."""

    changes: int = 0
    ranks: tuple[int, ...] = ()


def write_members(values: FolderValues, members: Members) -> None:
    """Publish the members, over those before."""
    values[_MEMBERS] = msgspec.json.encode(members)


def read_members(values: FolderValues) -> Members:
    """Return the members as the launcher has published them last."""
    return msgspec.json.decode(values.get(_MEMBERS) or b"{}", type=Members)
