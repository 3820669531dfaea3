"""Where the ranks of one model find each other: a key-value store as torch's own, which outlives any of them."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed import DistNetworkError, PrefixStore, Store  # type: ignore[attr-defined]

from cairn.model.training.membership import MeetingNumber, Position, next_meeting
from cairn.tasks.errors import TaskError
from cairn.tasks.trainer import rank_values, signed_connection, trainer_group

_CONNECT_SECONDS = 30.0
_TIMEOUT = timedelta(minutes=5)
_POLL_SECONDS = 0.02


class RemoteValues:
    """The values in another process, for several threads; `DistNetworkError`, as torch, once they are out of reach."""

    def __init__(self, address: str, secret: bytes, rank: int) -> None:
        """Join as `rank`; raises `TaskError` if that is taken."""
        self._lock = threading.Lock()
        try:  # the first machine's launcher listens before any rank starts
            self._peer = signed_connection.connect(address, secret, timeout_seconds=_CONNECT_SECONDS)
        except (OSError, signed_connection.ConnectionEnded) as error:
            raise DistNetworkError(f"{address}: the first machine's launcher does not answer: {error}") from error
        if self.ask(rank_values.Request(operation="add", key=f"joined/{rank}", number=1)).number > 1:
            self.close()
            raise TaskError(f"rank {rank} has joined this attempt already; the next attempt has a place for it")

    def ask(self, request: rank_values.Request) -> rank_values.Answer:
        """Execute a request there."""
        try:
            with self._lock:
                self._peer.send(msgspec.msgpack.encode(request))
                return msgspec.msgpack.decode(self._peer.receive(), type=rank_values.Answer)
        except (OSError, signed_connection.ConnectionEnded) as error:
            raise DistNetworkError(f"the first machine's launcher is gone: {error}") from error

    def close(self) -> None:
        """Hang up."""
        self._peer.close()


SharedValues = rank_values.FolderValues | RemoteValues


class RankStore(Store):
    """Shared values as a store of torch; once `is_over`, nothing is waited for any more."""

    def __init__(self, values: SharedValues, is_over: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.values, self._is_over = values, is_over

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value."""
        self._ask("set", key, value=_bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        self.wait([key])
        return self._ask("get", key).value or b""

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""
        return self._ask("add", key, number=amount).number

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Store a value where another is expected and is there; returns what is there then."""
        return self._ask("compare_set", key, value=_bytes(desired), expected=_bytes(expected)).value or b""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these keys have a value."""
        return all(self._ask("get", key).value is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = _TIMEOUT) -> None:
        """Wait until all these keys have a value; raises `TimeoutError` after the timeout."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline or self._is_over():
                raise TimeoutError(f"no value for {', '.join(keys)} within {timeout}")
            time.sleep(_POLL_SECONDS)

    def delete_key(self, key: str) -> bool:
        """Remove a key; returns whether it was there."""
        return bool(self._ask("delete", key).number)

    def clone(self) -> "RankStore":
        """Return the same store: its values may be shared."""
        return self

    def _ask(self, operation: rank_values.Operation, key: str, **values: Any) -> rank_values.Answer:
        return self.values.ask(rank_values.Request(operation=operation, key=key, **values))


def open_rank_store(environment: Mapping[str, str], *, rank: int) -> RankStore:
    """Return the store that the launcher named in the environment."""
    if path := environment.get(trainer_group.RANK_STORE):
        return RankStore(rank_values.FolderValues(Path(path)))
    secret = trainer_group.rendezvous_secret(environment)
    return RankStore(RemoteValues(environment[trainer_group.RENDEZVOUS], secret, rank))


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class FolderMeetings:
    """Where the ranks of one machine meet again; their launcher says who is left."""

    def __init__(self, values: rank_values.FolderValues) -> None:
        self._values, self._store = values, RankStore(values)  # kept: a prefix keeps no object of Python alive
        with values.waiting_path.open("r+b") as file:
            self._waiting = mmap.mmap(file.fileno(), 0)

    def members(self) -> tuple[int, tuple[int, ...]]:
        """Return how often the members have changed, and who they are now."""
        members = rank_values.read_members(self._values)
        return members.changes, members.ranks

    def mark(self, rank: int, *, is_waiting: bool) -> None:
        """Show the launcher whether a rank waits for others, which then are those that hang."""
        self._waiting[rank] = is_waiting

    def is_due(self, last: MeetingNumber) -> bool:
        """Whether the members have changed since, or another one waits at the next meeting."""
        changes, ranks = self.members()
        prefix = _prefix(next_meeting(last, changes))
        return changes > last[0] or any(self._values.get(f"{prefix}{rank}") for rank in ranks)

    def exchange(self, number: MeetingNumber, rank: int, own: Position) -> Sequence[Position] | None:
        """Wait for the position of every member; None if the members change before."""
        changes, ranks = self.members()
        prefix = _prefix(number)
        self._values[f"{prefix}{rank}"] = msgspec.json.encode(own)
        while changes == number[0]:
            found = [self._values.get(f"{prefix}{other}") for other in ranks]
            if all(found):
                return [msgspec.json.decode(document or b"", type=Position) for document in found]
            time.sleep(_POLL_SECONDS)
            changes, ranks = self.members()
        return None

    def store(self, number: MeetingNumber) -> Store:
        """Return the store of this meeting alone."""
        self._store = RankStore(self._values, lambda: self.members()[0] != number[0])
        return PrefixStore("connect/{}.{}".format(*number), self._store)


def _prefix(number: MeetingNumber) -> str:
    return "meeting/{}.{}/".format(*number)


class Rendezvous:
    """The values that every rank reaches; `store` is torch's, for the process group, `meetings` None between machines.

    Names of values begin with "cairn/".
    """

    def __init__(self, rank: int) -> None:
        self.store = open_rank_store(os.environ, rank=rank)
        values = self.store.values
        self.meetings = FolderMeetings(values) if isinstance(values, rank_values.FolderValues) else None
        self._values = PrefixStore("cairn", self.store)

    def has_lost(self, rank: int) -> bool:
        """Whether the ranks go on without this one."""
        return self.meetings is not None and rank not in self.meetings.members()[1]

    def put(self, name: str, data: bytes) -> None:
        """Store bytes under a name, over earlier ones."""
        self._values.set(name, data)  # type: ignore[arg-type] # the stub has text only

    def get(self, name: str, *, timeout_seconds: float = float("inf")) -> bytes:
        """Wait for the bytes under a name and return them; none after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while not self._values.check([name]):  # polls, because several threads share the connection
            if time.monotonic() > deadline:
                return b""
            time.sleep(_POLL_SECONDS)
        return bytes(self._values.get(name))
