"""The decisions of replicated ranks when one of them is lost: how far the step is, their shares, and where they meet.

Progress is counted in rounds, small exchanges that no rank leaves before all have entered them. So two ranks are at
most one round apart, and what the round gave is known to the one ahead: an update that only some have made is made by
the others too, from the sum that they have. Pure functions, which a model of all schedules runs (tests/protocol).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.distributed.distributed_c10d import Store

MeetingNumber = tuple[int, int]
"""How often the launcher has changed the members, and how often they have met since."""


class RanksApart(Exception):
    """Ranks that meet are more than one round apart: they cannot go on together."""


class SharesChanged(Exception):
    """Ranks were lost: those that are left begin the step again, with shares of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How many rounds a rank has completed, and with the last of them its result, and the members that took part."""

    rounds: int = 0
    result: bytes = b""
    members: tuple[int, ...] = ()


class MeetingPlace(Protocol):
    """Where the ranks find each other again; it outlives any of them."""

    def members(self) -> tuple[int, tuple[int, ...]]:
        """Return how often the members have changed, and which ranks they are now, rank 0 among them."""

    def mark(self, rank: int, *, is_waiting: bool) -> None:
        """Show whether a rank waits for others: where all seem to hang, it is not the one that does."""

    def is_due(self, last: MeetingNumber) -> bool:
        """Whether there is a meeting after `last`: the members have changed, or another one waits at the next."""

    def exchange(self, number: MeetingNumber, rank: int, own: Position) -> Sequence[Position] | None:
        """Wait for the position of every member; None if the members change before."""

    def store(self, number: MeetingNumber) -> Store:
        """Return the store in which the members connect; its waits end if the members change."""


def next_meeting(last: MeetingNumber, changes: int) -> MeetingNumber:
    """Return the meeting after `last` that all members come to: each leaves one only after it has failed there."""
    return max((changes, 0), (last[0], last[1] + 1))


def newest_position(positions: Sequence[Position]) -> Position:
    """Return the position that every rank takes over; raises RanksApart if one cannot know what it has missed."""
    newest = max(positions, key=lambda position: position.rounds)
    if newest.rounds - min(position.rounds for position in positions) > 1:
        raise RanksApart(f"rounds of the ranks that meet: {[position.rounds for position in positions]}")
    return newest


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
