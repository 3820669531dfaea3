"""A model of ranks that die, meet and go on: every schedule of a few steps, with the decisions of `membership`.

A step is G (can its batch be used?), B (the sum of gradients), S (the losses), U (the update) and T (stop?). G, S and T
are rounds: none ends before all ranks of the group have entered it. A rank may leave an exchange with an error once
another one is dead or has left, even if it could have completed it; which schedule comes is not up to us.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from cairn.model.training.membership import MeetingNumber, Position, newest_position, next_meeting

STEP = "GBSUT"
ROUNDS = "GST"
CONNECT = "connect"


@dataclass(frozen=True)
class Member:
    """A rank: where it is in its program, the group it is in, and what it has."""

    place: int = 0
    state: str = "runs"
    meeting: MeetingNumber = (0, 0)
    group: tuple[int, ...] = ()
    exchanges: int = 0
    position: Position = field(default_factory=Position)
    whole_sum: int = 0
    updates: int = 0

    @property
    def kind(self) -> str:
        """What it does next."""
        return STEP[self.place % len(STEP)]

    @property
    def step(self) -> int:
        """The step that it is in, 1-based."""
        return self.place // len(STEP) + 1


@dataclass(frozen=True)
class World:
    """All ranks (None if dead), what the launcher has published, and what lies at the meeting place."""

    members: tuple[Member | None, ...]
    changes: int = 0
    ranks: tuple[int, ...] = ()
    positions: frozenset[tuple[MeetingNumber, int, Position]] = frozenset()
    entered: frozenset[tuple[MeetingNumber, int, str, int]] = frozenset()
    deaths: int = 0
    failures: int = 0


class Broken(Exception):
    """A schedule that must not be."""


def begin(ranks: int, deaths: int, failures: int = 0) -> World:
    """Return the world before the first step, in which so many ranks may die, and connections fail for no reason."""
    every = tuple(range(ranks))
    first = Member(group=every, position=Position(members=every))
    return World(members=(first,) * ranks, ranks=every, deaths=deaths, failures=failures)


def successors(world: World, steps: int) -> Iterator[World]:
    """Yield what can come next; raises Broken where ranks do different things together."""
    for rank, member in enumerate(world.members):
        if member is None:
            continue
        if rank and world.deaths:
            yield replace(put(world, rank, None), deaths=world.deaths - 1)
        if member.place < steps * len(STEP) or member.state != "runs":
            yield from advance(world, rank, member)
        elif is_called(world, member):  # it waits for its next command
            yield put(world, rank, replace(member, state="lost"))
    for rank in world.ranks:
        if world.members[rank] is None:
            left = tuple(other for other in world.ranks if other != rank)
            yield replace(world, changes=world.changes + 1, ranks=left)


def advance(world: World, rank: int, member: Member) -> Iterator[World]:
    """Yield what a rank can do next."""
    if member.state == "lost":  # it reads who is left, and leaves its position
        number = next_meeting(member.meeting, world.changes)
        left = replace(member, state="meets", meeting=number, group=world.ranks, exchanges=0)
        yield replace(put(world, rank, left), positions=world.positions | {(number, rank, member.position)})
    elif member.state == "meets":
        found = [other for number, other, _ in world.positions if number == member.meeting]
        if world.changes != member.meeting[0]:
            yield put(world, rank, replace(member, state="lost"))
        elif set(member.group) <= set(found):
            yield enter(world, rank, replace(member, state=CONNECT), CONNECT)
    elif member.state == "runs" and member.kind == "U":
        if member.whole_sum != member.step or member.updates != member.step - 1:
            raise Broken(f"rank {rank} updates step {member.step} with the sum of {member.whole_sum}")
        yield put(world, rank, replace(member, place=member.place + 1, updates=member.step))
    elif member.state == "runs":
        yield enter(world, rank, replace(member, state="exchanges"), f"{member.kind}{member.step}")
    else:
        yield from end_exchange(world, rank, member)


def enter(world: World, rank: int, member: Member, what: str) -> World:
    """Take part in the group's next exchange, in which all must do the same."""
    key = (member.meeting, member.exchanges)
    if others := {other for *same, other, _ in world.entered if tuple(same) == key} - {what}:
        raise Broken(f"rank {rank} enters {what} while others are in {others}")
    return replace(put(world, rank, member), entered=world.entered | {(*key, what, rank)})


def end_exchange(world: World, rank: int, member: Member) -> Iterator[World]:
    """Complete the exchange if all have entered it, or fail if one is gone."""
    key = (member.meeting, member.exchanges)
    inside = {other for number, count, _, other in world.entered if (number, count) == key}
    if set(member.group) <= inside:
        done = replace(member, exchanges=member.exchanges + 1, state="runs")
        yield put(world, rank, go_on(world, done) if member.state == CONNECT else complete(done))
    if any(is_gone(world, other, member.meeting) for other in member.group):
        yield put(world, rank, replace(member, state="lost"))
    elif member.state == CONNECT and world.failures:
        yield replace(put(world, rank, replace(member, state="lost")), failures=world.failures - 1)


def is_gone(world: World, rank: int, meeting: MeetingNumber) -> bool:
    """Whether the others of a group have lost a rank: it is dead, or has left the group."""
    member = world.members[rank]
    return member is None or member.meeting > meeting or (member.meeting == meeting and member.state == "lost")


def is_called(world: World, member: Member) -> bool:
    """Whether a rank without work has to meet the others."""
    following = next_meeting(member.meeting, world.changes)
    return world.changes > member.meeting[0] or any(number == following for number, *_ in world.positions)


def complete(member: Member) -> Member:
    """Return the rank after an exchange."""
    whole_sum = member.step if member.kind == "B" else member.whole_sum
    position = member.position
    if member.kind in ROUNDS:
        result = f"{member.kind}{member.step} {member.meeting}".encode()
        position = Position(rounds=position.rounds + 1, result=result, members=member.group)
    return replace(member, place=member.place + 1, whole_sum=whole_sum, position=position)


def go_on(world: World, member: Member) -> Member:
    """Return the rank once it has met the others: as `Ranks` does where an exchange has failed."""
    newest = newest_position([position for number, _, position in world.positions if number == member.meeting])
    is_ahead = newest.rounds > member.position.rounds
    member = replace(member, position=newest)
    if is_ahead and member.kind in "ST":
        return replace(member, place=member.place + 1)
    if is_ahead and member.kind == "B":
        raise Broken("others have completed a step without this rank's part of the sum")
    if member.kind == "T":
        return member
    return replace(member, place=member.place - STEP.index(member.kind))


def put(world: World, rank: int, member: Member | None) -> World:
    """Return the world with this rank; the dead leave."""
    members = (*world.members[:rank], member, *world.members[rank + 1 :])
    return replace(world, members=members)


def check(world: World, steps: int, following: Sequence[World]) -> None:
    """Raise Broken if ranks that are equally far know different things, or if all wait for ever."""
    alive = [member for member in world.members if member is not None]
    results = {member.position for member in alive}
    if len({position.rounds for position in results}) != len(results):
        raise Broken(f"ranks differ about a round: {results}")
    is_over = all(member.place == steps * len(STEP) and member.state == "runs" for member in alive)
    if is_over and {member.updates for member in alive} != {steps}:
        raise Broken("a rank has missed an update")
    moves = [after for after in following if after.deaths == world.deaths]
    if not is_over and not moves:
        raise Broken(f"all wait: {world}")


def explore(world: World, steps: int, at_most: int = 10**9) -> int:
    """Visit every world that can come to be, or the first so many; return their number."""
    seen, waiting = {world}, [world]
    while waiting and len(seen) < at_most:
        current = waiting.pop()
        following = list(successors(current, steps))
        check(current, steps, following)
        for after in following:
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return len(seen)
