"""The key-value store by which the ranks of one attempt find each other, as torch's process group wants it.

On one machine it is a file in a folder that only this user may enter, and nothing listens for it. On several it is a
signed connection to the first machine's launcher (`rendezvous_server`). Neither reads pickles.
"""

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import msgspec
from torch.distributed import DistNetworkError, FileStore, Store  # type: ignore[attr-defined]

from tasks.errors import TaskError
from tasks.trainer.rendezvous_server import Answer, Request
from tasks.trainer.signed_connection import ConnectionEnded, SignedConnection, greet
from tasks.trainer.trainer_group import RANK_STORE, RENDEZVOUS, rendezvous_secret

_CONNECT_SECONDS = 30.0
_TIMEOUT = timedelta(minutes=5)
_POLL_SECONDS = 0.02


class RemoteRankStore(Store):
    """The store in another process, for several threads; `DistNetworkError` once its connection is lost, as torch."""

    def __init__(self, address: str, secret: bytes, rank: int) -> None:
        """Join as `rank`; raises `TaskError` if that is taken."""
        super().__init__()
        self._lock, self._timeout = threading.Lock(), _TIMEOUT
        self._peer = _meet(address, secret)
        if not self._ask(Request(operation="join", number=rank)).number:
            self.close()
            raise TaskError(f"rank {rank} has joined this attempt already; the next attempt has a place for it")

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value."""
        self._ask(Request(operation="set", keys=(key,), value=_bytes(value)))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        self.wait([key])
        return self._ask(Request(operation="get", keys=(key,))).value or b""

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""
        return self._ask(Request(operation="add", keys=(key,), number=amount)).number

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Store a value where another is expected and is there; returns what is there then."""
        request = Request(operation="compare_set", keys=(key,), value=_bytes(desired), expected=_bytes(expected))
        return self._ask(request).value or b""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these keys have a value."""
        return bool(self._ask(Request(operation="check", keys=tuple(keys))).number)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these keys have a value; raises `TimeoutError` after the timeout."""
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody has said {', '.join(keys)} within {timeout or self._timeout}")
            time.sleep(_POLL_SECONDS)

    def delete_key(self, key: str) -> bool:
        """Remove a key; returns whether it was there."""
        return bool(self._ask(Request(operation="delete", keys=(key,))).number)

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return self._ask(Request(operation="count")).number

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait no longer than this where nothing else is said."""
        self._timeout = timeout

    def clone(self) -> "RemoteRankStore":
        """Return the same store: its connection may be shared."""
        return self

    def close(self) -> None:
        """Hang up."""
        self._peer.close()

    def _ask(self, request: Request) -> Answer:
        try:
            with self._lock:
                self._peer.send(msgspec.msgpack.encode(request))
                return msgspec.msgpack.decode(self._peer.receive(), type=Answer)
        except (OSError, ConnectionEnded) as error:
            raise DistNetworkError(f"the first machine's launcher is gone: {error}") from error


def open_rank_store(environment: Mapping[str, str], *, rank: int, size: int) -> Store:
    """Return the store that the launcher named in the environment."""
    if path := environment.get(RANK_STORE):
        return FileStore(path, size)
    return RemoteRankStore(environment[RENDEZVOUS], rendezvous_secret(environment), rank)


def _meet(address: str, secret: bytes) -> SignedConnection:
    """Connect to the first machine's launcher, which listens before any rank starts."""
    host, _, port = address.rpartition(":")
    try:
        return greet(socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS), secret)
    except (OSError, ConnectionEnded) as error:
        raise DistNetworkError(f"{address}: the first machine's launcher does not answer: {error}") from error


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
