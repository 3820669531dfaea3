"""A model of ranks that die, meet, join and go on: every schedule of a few steps, with the decisions of `membership`.

A step is G (can its batch be used?), B (the sum of gradients), S (the losses), U (the update) and T (stop, or let
others in?). Then H (the state is handed over) and A (do all have it?) if somebody is let in. G, S, T and A
are rounds: none ends before all ranks of the group have entered it. A rank may leave an exchange with an error once
another one is dead or has left, even if it could have completed it; which schedule comes is not up to us.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from cairn.model.training.membership import (
    NOWHERE,
    MeetingNumber,
    Members,
    Position,
    newcomers,
    newest_position,
    next_meeting,
)

STEP = "GBSUT"
ROUNDS = "GSTA"
ADMITS = b" admits"
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
    is_admitting: bool = False
    has_handed: bool = False
    admissions: int = 0
    met: int = 0

    @property
    def kind(self) -> str:
        """What it does next."""
        if self.is_admitting:
            return "A" if self.has_handed else "H"
        return STEP[self.place % len(STEP)]

    @property
    def step(self) -> int:
        """The step that it is in, 1-based."""
        return self.place // len(STEP) + 1


@dataclass(frozen=True)
class World:
    """All ranks (None if dead), what the launcher has published, and what lies at the meeting place."""

    members: tuple[Member | None, ...]
    published: Members
    positions: frozenset[tuple[MeetingNumber, int, Position]] = frozenset()
    entered: frozenset[tuple[MeetingNumber, int, str, int]] = frozenset()
    wishes: frozenset[tuple[MeetingNumber, int]] = frozenset()
    deaths: int = 0
    failures: int = 0
    joiners: int = 0


class Broken(Exception):
    """A schedule that must not be."""


def begin(ranks: int, deaths: int, failures: int = 0, joiners: int = 0) -> World:
    """Return the world before the first step: so many ranks may die or join, connections fail for no reason."""
    every = tuple(range(ranks))
    first = Member(group=every, position=Position(members=every))
    limits = {"deaths": deaths, "failures": failures, "joiners": joiners}
    return World(members=(first,) * ranks, published=Members(ranks=every), **limits)


def successors(world: World, steps: int) -> Iterator[World]:
    """Yield what can come next; raises Broken where ranks do different things together."""
    published = world.published
    for rank, member in enumerate(world.members):
        if member is None:
            continue
        if rank and world.deaths:
            yield replace(put(world, rank, None), deaths=world.deaths - 1)
        if member.state != "runs" or member.is_admitting or member.place < steps * len(STEP):
            yield from advance(world, rank, member)
        elif is_called(world, member):  # it waits for its next command
            yield put(world, rank, replace(member, state="lost"))
    for rank in (*published.ranks, *published.waiting):
        if world.members[rank] is None:
            yield replace(world, published=published.without([rank]))
    if world.joiners:
        joiner = Member(state="waits", position=NOWHERE, is_admitting=True)
        waiting = published.with_waiting(len(world.members))
        yield replace(world, members=(*world.members, joiner), published=waiting, joiners=world.joiners - 1)


def advance(world: World, rank: int, member: Member) -> Iterator[World]:
    """Yield what a rank can do next."""
    published = world.published
    if member.state == "waits":
        if rank in published.ranks:
            yield put(world, rank, replace(member, state="lost", admissions=published.admissions))
    elif member.state == "lost":  # it reads who is left, and leaves its position
        number = next_meeting(member.meeting, published.changes)
        left = replace(member, state="meets", meeting=number, group=published.ranks, exchanges=0)
        yield replace(put(world, rank, left), positions=world.positions | {(number, rank, member.position)})
    elif member.state == "meets":
        found = [other for number, other, _ in world.positions if number == member.meeting]
        if published.changes != member.meeting[0]:
            yield put(world, rank, replace(member, state="lost"))
        elif set(member.group) <= set(found):
            yield enter(world, rank, replace(member, state=CONNECT, met=published.admissions), CONNECT)
    elif member.state == "runs" and member.is_admitting:
        yield from admit(world, rank, member)
    elif member.state == "runs" and member.kind == "U":
        if member.whole_sum != member.step or member.updates != member.step - 1:
            raise Broken(f"rank {rank} updates step {member.step} with the sum of {member.whole_sum}")
        yield put(world, rank, replace(member, place=member.place + 1, updates=member.step))
    elif member.state == "runs":
        entered = enter(world, rank, replace(member, state="exchanges"), f"{member.kind}{member.step}")
        is_wished = rank == 0 and member.kind == "T" and published.waiting
        yield replace(entered, wishes=world.wishes | ({(member.meeting, member.exchanges)} if is_wished else set()))
    else:
        yield from end_exchange(world, rank, member)


def admit(world: World, rank: int, member: Member) -> Iterator[World]:
    """Yield the world after a rank's next deed once all have agreed to let others in."""
    if rank == 0 and world.published.admissions < member.admissions:
        yield replace(world, published=world.published.admitted(member.admissions))
    elif member.met < member.admissions:  # it stays until it is called: rank 0 may have yet to meet the others
        if is_called(world, member):
            yield put(world, rank, replace(member, state="lost"))
    elif newcomers(member.group, member.position):
        yield enter(world, rank, replace(member, state="exchanges"), member.kind)
    else:
        yield put(world, rank, replace(member, is_admitting=False, has_handed=False))


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
        if member.state == CONNECT:
            yield put(world, rank, go_on(world, done))
        else:
            yield put(world, rank, complete(world, rank, done, key in world.wishes))
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
    following = next_meeting(member.meeting, world.published.changes)
    return world.published.changes > member.meeting[0] or any(number == following for number, *_ in world.positions)


def complete(world: World, rank: int, member: Member, is_wished: bool) -> Member:
    """Return the rank after an exchange."""
    whole_sum, position, kind = member.whole_sum, member.position, member.kind
    if kind == "B":
        whole_sum = member.step
    if kind in ROUNDS:
        result = f"{kind}{member.place} {member.meeting}".encode() + ADMITS * is_wished
        position = Position(rounds=position.rounds + 1, result=result, members=member.group)
    if kind == "H":
        giver = world.members[0]
        assert giver is not None
        if rank in newcomers(member.group, position):
            member = replace(member, place=giver.place, updates=giver.updates)
        return replace(member, has_handed=True)
    if kind == "A":
        return replace(member, position=position, is_admitting=False, has_handed=False)
    member = replace(member, place=member.place + 1, whole_sum=whole_sum, position=position)
    return begin_admission(member) if is_wished else member


def begin_admission(member: Member) -> Member:
    """Return the rank once it knows that others are let in."""
    return replace(member, is_admitting=True, has_handed=False, admissions=member.admissions + 1)


def go_on(world: World, member: Member) -> Member:
    """Return the rank once it has met the others: as `Ranks` does where an exchange has failed."""
    newest = newest_position([position for number, _, position in world.positions if number == member.meeting])
    is_ahead = newest.rounds > member.position.rounds
    member = replace(member, position=newest)
    if member.is_admitting:
        return replace(member, has_handed=False)
    if is_ahead and member.kind in "ST":
        member = replace(member, place=member.place + 1)
        return begin_admission(member) if newest.result.endswith(ADMITS) else member
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
    alive = [member for member in world.members if member is not None and member.state != "waits"]
    results = {member.position for member in alive if member.position != NOWHERE}
    if len({position.rounds for position in results}) != len(results):
        raise Broken(f"ranks differ about a round: {results}")
    is_over = all(
        member.place == steps * len(STEP) and member.state == "runs" and not member.is_admitting for member in alive
    )
    if is_over and {member.updates for member in alive} != {steps}:
        raise Broken("a rank has missed an update")
    moves = [after for after in following if (after.deaths, after.joiners) == (world.deaths, world.joiners)]
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
