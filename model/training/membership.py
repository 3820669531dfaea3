"""The decisions of replicated ranks when one is lost or joins: how far the step is, their shares, and where they meet.

Progress is counted in rounds, small exchanges that no rank leaves before all have entered them. So two ranks are at
most one round apart, and what the round gave is known to the one ahead: an update that only some have made is made by
the others too, from the sum that they have. Pure functions, which a model of all schedules runs (tests/protocol).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MeetingNumber = tuple[int, int]
"""How often the launcher has changed the members, and how often they have met since."""


class RanksApart(Exception):
    """Ranks that meet are more than one round apart: they cannot go on together."""


class SharesChanged(Exception):
    """Ranks were lost: those that are left begin the step again, with shares of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """Which ranks train together, and which wait to join them; no number of a rank is given twice.

    `changes` counts how often the ranks have changed, `admissions` how often rank 0 has let in those who waited.
    Without ranks their end has begun.
    """

    changes: int = 0
    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    admissions: int = 0

    def without(self, lost: Collection[int]) -> "Members":
        """Return those left when these are gone."""
        left = tuple(rank for rank in self.ranks if rank not in lost)
        waiting = tuple(rank for rank in self.waiting if rank not in lost)
        return replace(self, changes=self.changes + (left != self.ranks), ranks=left, waiting=waiting)

    def with_waiting(self, rank: int) -> "Members":
        """Return them with one more that waits."""
        return replace(self, waiting=(*self.waiting, rank))

    def admitted(self, number: int) -> "Members":
        """Return them after the admission of this number, which is made once, even if nobody waits any more."""
        if self.admissions >= number or not self.ranks:
            return self
        return Members(changes=self.changes + 1, ranks=(*self.ranks, *self.waiting), admissions=number)

    def ended(self) -> "Members":
        """Return them once their end has begun."""
        return Members(changes=self.changes + 1, admissions=self.admissions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How many rounds a rank has completed, and with the last of them its result, and the members that took part."""

    rounds: int = 0
    result: bytes = b""
    members: tuple[int, ...] = ()


NOWHERE = Position(rounds=-1)
"""The position of a rank that has no state yet."""


class MeetingPlace(Protocol):
    """Where the ranks find each other again; it outlives any of them."""

    def members(self) -> Members:
        """Return the members as they are now, rank 0 among them."""

    def admit(self, number: int) -> None:
        """Let in those who wait, see `Members.admitted`; for rank 0."""

    def wait_for_admission(self, rank: int) -> None:
        """Wait until this rank has been let in, or the end has begun."""

    def mark(self, rank: int, *, is_waiting: bool) -> None:
        """Show whether a rank waits for others: where all seem to hang, it is not the one that does."""

    def is_due(self, last: MeetingNumber) -> bool:
        """Whether there is a meeting after `last`: the members have changed, or another one waits at the next."""

    def exchange(self, number: MeetingNumber, rank: int, own: Position) -> Sequence[Position] | None:
        """Wait for the position of every member; None if the members change before."""

    def store(self, number: MeetingNumber) -> "Store":
        """Return the store in which the members connect; its waits end if the members change."""


def next_meeting(last: MeetingNumber, changes: int) -> MeetingNumber:
    """Return the meeting after `last` that all members come to: each leaves one only after it has failed there."""
    return max((changes, 0), (last[0], last[1] + 1))


def newest_position(positions: Sequence[Position]) -> Position:
    """Return the position that every rank takes over; raises RanksApart if one cannot know what it has missed."""
    newest, rounds = max(positions, key=lambda position: position.rounds), [position.rounds for position in positions]
    if any(newest.rounds - own > 1 for own in rounds if own != NOWHERE.rounds):
        raise RanksApart(f"rounds of the ranks that meet: {rounds}")
    return newest


def newcomers(members: Sequence[int], position: Position) -> tuple[int, ...]:
    """Return which members have taken part in no round yet: all others have the state that these need."""
    return tuple(rank for rank in members if rank not in position.members)


def share_passes(count: int, ranks: int) -> tuple[range, ...]:
    """Share `count` micro-batches among any number of ranks: each gets a whole subtree of the one sum over them.

    The largest subtree is cut until there are enough. A power of two of ranks that can share equally do.
    """
    shares = [range(count)]
    while len(shares) < ranks:
        place = max(range(len(shares)), key=lambda number: len(shares[number]))
        share = shares[place]
        middle = share.start + (1 << (len(share) - 1).bit_length() - 1)
        shares[place : place + 1] = [range(share.start, middle), range(middle, share.stop)]
    return tuple(shares)
