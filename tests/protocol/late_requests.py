"""A request of a dead process arrives before each operation of whoever goes on, from every starting state.

Owns which arrivals there are: every change that a scenario, or a rival in its world, asks for is sent by a process that
dies with it, and arrives before each operation of each rival, and after its last. Only the rivals are listed by hand.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.protocol import forks, processes
from tests.protocol.commuting import RecordingStore
from tests.protocol.enumeration import ALL_SCENARIOS, promote_oldest, take_over, take_over_and_sweep
from tests.protocol.invariants import continue_run, examine
from tests.protocol.processes import Act, Process
from tests.protocol.quick_world import witnessed
from tests.protocol.raw_history import Violation
from tests.protocol.scenarios import Scenario
from tests.protocol.world import Copies, Ledger, Snapshot, WatchedStore, copied
from tests.storage.faulty_store import ArrivingStore, Fault, FaultyStore, applies


def roll_back(process: Process) -> None:
    """Roll the alias back."""
    processes.go_back(process)


def evaluate_newest(process: Process) -> None:
    """Evaluate the newest readable checkpoint."""
    for record in process.log().refresh().readable[:1]:
        processes.evaluate(process, record.committed.prefix, processes.measured(0.5), None)


def fork_oldest(process: Process) -> None:
    """Fork the oldest readable checkpoint, and begin to train the fork."""
    for record in process.log().refresh().readable[-1:]:
        forks.fork(process, record.committed.step)
        forks.train_fork(process)


def open_and_train(process: Process) -> None:
    """Open the run unless it is open, commit once, finish and end."""
    processes.open_run(process)
    processes.train(process, commits=1, finish=True)


RIVALS: tuple[Act, ...] = (
    open_and_train,
    take_over,
    processes.sweep,
    take_over_and_sweep,
    evaluate_newest,
    promote_oldest,
    roll_back,
    fork_oldest,
    forks.train_fork,
    processes.delete,
)


@dataclass(frozen=True)
class Sender:
    """A starting state, and what a process does there that dies with its change number `at` under way."""

    scenario: Scenario
    act: Act
    at: int


@dataclass(frozen=True)
class Sent:
    """The world after the sender has died, and what it sent."""

    sender: Sender
    world: Snapshot
    request: tuple[str, tuple[Any, ...], Any]

    def __str__(self) -> str:
        name, args, _ = self.request
        act = getattr(self.sender.act, "__name__", "its act")
        return f"{self.sender.scenario.name}: {name} {args[0]}, operation {self.sender.at} of {act}, arrives"


def senders(scenario: Scenario, acts: Iterable[Act], copies: Copies) -> Iterator[Sender]:
    """Yield a sender for every change that each of these acts asks for in the scenario's world."""
    for act in acts:
        counting = FaultyStore(copies.fresh())  # type: ignore[arg-type]
        processes.attempt(act, Process(store=counting, ledger=deepcopy(copies.snapshot.ledger), host="victim"))
        changes = (at for at, name in enumerate(counting.operations) if applies(Fault.LATE, name, counting.inner))
        yield from (Sender(scenario, act, at) for at in changes)


def send(sender: Sender, copies: Copies) -> Sent:
    """Let the sender die, known to be dead, with its request under way."""
    store, ledger = copies.fresh(), deepcopy(copies.snapshot.ledger)
    faulty = FaultyStore(store, Fault.LATE, sender.at)  # type: ignore[arg-type]
    victim = Process(store=faulty, ledger=ledger, host="victim")
    with witnessed(ledger):
        processes.attempt(sender.act, victim)
    assert faulty.sent is not None
    ledger.dead.add(victim.pid)
    return Sent(sender, Snapshot(dict(store.inner._objects), tuple(store.leftovers), ledger), faulty.sent)


def moments(sent: Sent, rival: Act) -> list[range]:
    """Return when the request can arrive, before an operation of the rival or after the last; equal ones together."""
    recording = RecordingStore(_fresh(sent))
    processes.attempt(rival, Process(store=recording, ledger=deepcopy(sent.world.ledger), host="rival"))
    return recording.moments(partial(_request, sent))


def arrive(sent: Sent, rival: Act, chosen: Iterable[range]) -> int:
    """Let the request arrive at the last of the moments that are the same, and the run and its fork go on.

    Returns how often.
    """
    number = 0
    for same in chosen:
        number += 1
        try:
            play(sent, rival, same[-1])
        except Violation as violation:
            raise Violation(f"{violation} [{sent} before operation {same[-1]} of {rival.__name__}]") from violation
    return number


def _request(sent: Sent, store: WatchedStore) -> object:
    name, args, named = sent.request
    return getattr(store, name)(*args, **named)


def play(sent: Sent, rival: Act, at: int) -> tuple[WatchedStore, Ledger]:
    """Let the request arrive before operation `at` of the rival, or after all; returns what is left in the end."""
    store, ledger = _fresh(sent), deepcopy(sent.world.ledger)
    arriving = ArrivingStore(store, partial(_request, sent, store), at)
    process = Process(store=arriving, ledger=ledger, host="rival")
    with witnessed(ledger):
        processes.attempt(rival, process)
        if arriving.seen <= at:
            arriving.late()
    ledger.dead.add(process.pid)
    examine(store, ledger)
    continue_run(store, ledger)
    return store, ledger


def _fresh(sent: Sent) -> WatchedStore:
    return WatchedStore(copied(sent.world.objects), sent.world.leftovers)


_WORLDS = {item.world: item for item in reversed(ALL_SCENARIOS)}
CASES: dict[str, tuple[Scenario, tuple[Act, ...]]] = {
    **{item.name: (item, (item.act,)) for item in ALL_SCENARIOS},
    **{f"world-{name}": (item, RIVALS) for name, item in _WORLDS.items()},
}
"""Every scenario with its own act, and every world of one with everything that a rival can do there."""
