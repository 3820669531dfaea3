"""Where the ranks of one model find each other: a key-value store as torch's own, which outlives any of them."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed import DistNetworkError, PrefixStore, Store  # type: ignore[attr-defined]

from cairn.model.training.membership import MeetingNumber, Members, Position, next_meeting
from cairn.tasks.trainer import rank_values, trainer_group

_TIMEOUT = timedelta(minutes=5)
_POLL_SECONDS = 0.02


class RankStore(Store):
    """Shared values as a store of torch; once `is_over`, nothing is waited for any more.

    Raises torch's `DistNetworkError` where the values are out of reach.
    """

    def __init__(self, values: rank_values.SharedValues, is_over: Callable[[], bool] = lambda: False) -> None:
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

    def ask(self, request: rank_values.Request) -> rank_values.Answer:
        """Execute a request on the values."""
        try:
            return self.values.ask(request)
        except rank_values.ValuesGone as error:
            raise DistNetworkError(str(error)) from error

    def _ask(self, operation: rank_values.Operation, key: str, **values: Any) -> rank_values.Answer:
        return self.ask(rank_values.Request(operation=operation, key=key, **values))


def open_rank_store(environment: Mapping[str, str], *, rank: int) -> RankStore:
    """Return the store that the launcher named in the environment."""
    if path := environment.get(trainer_group.RANK_STORE):
        return RankStore(rank_values.FolderValues(Path(path)))
    secret = trainer_group.rendezvous_secret(environment)
    try:
        return RankStore(rank_values.RemoteValues(environment[trainer_group.RENDEZVOUS], secret, rank))
    except rank_values.ValuesGone as error:
        raise DistNetworkError(str(error)) from error


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class Meetings:
    """Where ranks meet again, and let others join; their launchers say who is left."""

    def __init__(self, store: RankStore, marks: rank_values.WaitingMarks) -> None:
        self._values, self._marks = store, marks
        self._store = store  # of the newest meeting, kept: a prefix keeps no object of Python alive

    def members(self) -> Members:
        """Return the members as they are now."""
        return rank_values.read_members(self._values)

    def admit(self, number: int) -> None:
        """Make those members who wait, unless this admission has been made."""
        rank_values.change_members(self._values, lambda members: members.admitted(number))

    def wait_for_admission(self, rank: int) -> None:
        """Say that a rank is ready, and wait until it is a member, or the end has begun."""
        rank_values.change_members(self._values, lambda members: members.with_waiting(rank))
        while (members := self.members()).ranks and rank not in members.ranks:
            time.sleep(_POLL_SECONDS)

    def mark(self, rank: int, *, is_waiting: bool) -> None:
        """Show the launcher whether a rank waits for others, which then are those that hang."""
        self._marks.set(rank, is_waiting)

    def is_due(self, last: MeetingNumber) -> bool:
        """Whether the members have changed since, or another one waits at the next meeting."""
        members = self.members()
        prefix = _prefix(next_meeting(last, members.changes))
        return members.changes > last[0] or any(self._position(prefix, rank) for rank in members.ranks)

    def exchange(self, number: MeetingNumber, rank: int, own: Position) -> Sequence[Position] | None:
        """Wait for the position of every member; None if the members change before."""
        members, prefix = self.members(), _prefix(number)
        rank_values.set_value(self._values, f"{prefix}{rank}", msgspec.json.encode(own))
        while members.changes == number[0]:
            found = [self._position(prefix, other) for other in members.ranks]
            if all(found):
                return [msgspec.json.decode(document or b"", type=Position) for document in found]
            time.sleep(_POLL_SECONDS)
            members = self.members()
        return None

    def store(self, number: MeetingNumber) -> Store:
        """Return the store of this meeting alone."""
        self._store = RankStore(self._values.values, lambda: self.members().changes != number[0])
        return PrefixStore("connect/{}.{}".format(*number), self._store)

    def _position(self, prefix: str, rank: int) -> bytes | None:
        return rank_values.get_value(self._values, f"{prefix}{rank}")


def _prefix(number: MeetingNumber) -> str:
    return "meeting/{}.{}/".format(*number)


class Rendezvous:
    """The values that every rank reaches; `store` is torch's, for the process group, `meetings` for ranks that go on.

    Names of values begin with "cairn/". `commands` counts those of the parent that this rank has taken.
    """

    def __init__(self, rank: int) -> None:
        self.store, self.commands = open_rank_store(os.environ, rank=rank), 0
        marks = rank_values.WaitingMarks(Path(os.environ[trainer_group.RANK_MARKS]))
        self.meetings, self._values = Meetings(self.store, marks), PrefixStore("cairn", self.store)

    def has_lost(self, rank: int) -> bool:
        """Whether the ranks go on without this one."""
        return rank not in self.meetings.members().ranks

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
