"""A seeded simulation of several processes on one store: who goes next, what fails and who dies is drawn from the seed.

Each process is the product's own code in a greenlet that hands over before every store operation and every sleep, so a
schedule is one interleaving of operations, exactly repeatable: one thread, no clock, no other randomness. Owns
schedules; the rules are in `invariants` and `raw_history`. Compare FoundationDB's simulation testing.
"""

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from greenlet import greenlet

from tests.protocol import forks, processes
from tests.protocol.enumeration import promote_oldest
from tests.protocol.forks import FORKS
from tests.protocol.holes import HOLES
from tests.protocol.invariants import continue_run, examine
from tests.protocol.processes import REFUSALS, Process, VirtualClock
from tests.protocol.quick_world import witnessed
from tests.protocol.raw_history import Violation
from tests.protocol.scenarios import SCENARIOS, Scenario, world_before
from tests.protocol.world import Snapshot, WatchedStore, bring_missing, copied
from tests.storage.faulty_store import DEADLY, FOLLOWING, Death, Fault, applies, delete_one_by_one, on_its_way, perform

LONGEST = 400
_FATES = (
    Fault.ERROR_BEFORE,
    Fault.RESPONSE_LOST,
    Fault.RESPONSE_LOST,
    Fault.DEATH_BEFORE,
    Fault.DEATH_AFTER,
    Fault.TORN_ERROR,
    Fault.TORN_DEATH,
    Fault.THROTTLED,
    Fault.LOST_THEN_THROTTLED,
    Fault.LATE,
    Fault.LATE,
    Fault.BAD_READ,
    Fault.NOT_DURABLE,
)


@dataclass(frozen=True)
class Role:
    """What kind of process it is and what it does with its own share of the randomness."""

    name: str
    act: Callable[[Process, random.Random], None]


def _train(process: Process, chance: random.Random) -> None:
    processes.open_run(process)
    processes.train(process, commits=chance.randint(1, 3), evaluated=chance.random() < 0.3)


def _evaluate(process: Process, chance: random.Random) -> None:
    for _ in range(2):
        known = [record.committed.prefix for record in process.log().refresh().checkpoints]
        if known:
            processes.evaluate(process, chance.choice(known), processes.measured(chance.random()), None)


def _promote(process: Process, chance: random.Random) -> None:
    promote_oldest(process)
    if chance.random() < 0.5:
        processes.go_back(process)
    known = [record.committed.prefix for record in process.log().refresh().readable]
    if known:
        processes.promote(process, chance.choice(known))


def _sweep(process: Process, chance: random.Random) -> None:
    for _ in range(2):
        processes.sweep(process)


def _fork(process: Process, chance: random.Random) -> None:
    known = [record.committed.step for record in process.log().refresh().readable]
    if known:
        forks.fork(process, chance.choice(known))
    forks.train_fork(process, commits=chance.randint(1, 3))


def _bring_missing(process: Process, chance: random.Random) -> None:
    for _ in range(chance.randint(0, 30)):
        process.clock.sleep(1)
    bring_missing(process.store, process.ledger)


def _is_mistaken(chance: random.Random, rate: float) -> bool:
    """Whether a process takes a living one for dead."""
    return chance.random() < rate


TRAINER = Role("trainer", _train)
ROLES = (TRAINER, TRAINER, Role("evaluator", _evaluate), Role("promoter", _promote), Role("sweeper", _sweep))
DELETER = Role("deleter", lambda process, chance: processes.delete(process))
DELETED_IN = 6
"""Of so many schedules one has a person in it who deletes the run."""
FORKER = Role("forker", _fork)
FORKED_IN = 5
"""Of so many schedules one has a process in it that forks the run and trains the fork, often from a world with one."""
COPIER = Role("copier", _bring_missing)
HOLED_IN = 7
"""Of so many schedules one begins while the store is being copied: an entry is missing and comes later."""
_NO_WORLDS = frozenset({"second_is_broken", "torn_and_ended", "left_by_its_alias"})
WORLDS = tuple({item.before: item for item in SCENARIOS if item.before.__name__ not in _NO_WORLDS}.values())
FORK_WORLDS = tuple({item.before: item for item in FORKS if item.before is not forks.spoiled}.values())


class Actor:
    """One process of a simulation: its greenlet, and the operation it is about to do."""

    def __init__(self, simulation: "Simulation", role: Role, number: int, seed: str) -> None:
        self.simulation, self.role, self.name = simulation, role, f"{role.name}-{number}"
        self.clock = SimulatedClock(self)
        self.process = Process(
            store=SimulatedStore(self),
            ledger=simulation.ledger,
            host=self.name,
            pid=10_000 + number,
            clock=self.clock,
            mistaken=partial(_is_mistaken, random.Random(f"mistaken {seed}"), simulation.mistake_rate),
            shard_bytes=1024,
        )
        self.greenlet: Any = greenlet(partial(self._live, random.Random(seed)))
        self.pending = "begin"
        self.throttled = self.asleep_until = 0
        self.is_dead = self.has_misread = False
        self.end = ""

    def _live(self, chance: random.Random) -> None:
        try:
            self.role.act(self.process, chance)
            self.end = "done"
        except Death:
            self.end = "dead"
        except REFUSALS as error:
            self.end = f"{type(error).__name__}: {error}"

    def ask(self, operation: str) -> Fault | None:
        """Hand over, and return what fate the next operation has; a dead process does nothing more."""
        if self.is_dead:
            raise Death
        self.pending = operation
        fate: Fault | None = self.greenlet.parent.switch()
        return fate


@dataclass
class SimulatedClock(VirtualClock):
    """Sleeping is a chance for everybody else."""

    actor: Actor | None = None

    def __init__(self, actor: Actor) -> None:
        self.now, self.actor = 0.0, actor

    def sleep(self, seconds: float) -> None:
        assert self.actor is not None
        if self.actor.ask("sleep") in DEADLY:
            raise Death
        self.now += seconds


class SimulatedStore:
    """The shared store as one process sees it."""

    def __init__(self, actor: Actor) -> None:
        self.actor, self.inner = actor, actor.simulation.store

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        return partial(self._operate, name, value) if callable(value) else value

    delete_all = delete_one_by_one

    def _operate(self, name: str, operation: Callable[..., Any], *args: Any, **named: Any) -> Any:
        fate = self.actor.ask(f"{name} {next((arg for arg in args if isinstance(arg, str)), '')}")
        if fate is None:
            return operation(*args, **named)
        if fate is Fault.NOT_DURABLE and not applies(fate, name, self.inner):
            fate = Fault.ERROR_BEFORE  # nothing is written here that could be synced
        if fate is Fault.LATE and applies(fate, name, self.inner):
            self.actor.simulation.late.append(on_its_way(operation, args, named))
        return perform(fate, self.inner, name, operation, args, named)


@dataclass
class Simulation:
    """One schedule."""

    seed: int
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        scenario: Scenario = self.chance.choice(WORLDS)
        if is_forked := self.seed % FORKED_IN == 2:
            scenario = random.Random(f"forks {self.seed}").choice(FORK_WORLDS)
        elif self.seed % HOLED_IN == 3:
            scenario = random.Random(f"holes {self.seed}").choice(HOLES)
        snapshot: Snapshot = world_before(scenario)
        self.store, self.ledger = WatchedStore(copied(snapshot.objects), snapshot.leftovers), deepcopy(snapshot.ledger)
        self.trace.append(f"world: {scenario.world}")
        self.fault_rate = self.chance.choice((0.0, 0.02, 0.05, 0.1))
        self.pause_rate = self.chance.choice((0.0, 0.02, 0.05))
        self.mistake_rate = random.Random(f"mistakes {self.seed}").choice((0.0, 0.2, 0.7))
        self.step, self.started, self.restarts = 0, 0, self.chance.randint(0, 3)
        self.actors: list[Actor] = []
        self.late: list[Callable[[], object]] = []
        for role in [TRAINER, *self.chance.choices(ROLES, k=self.chance.randint(1, 3))]:
            self._start(role)
        if self.seed % DELETED_IN == 0:
            self._start(DELETER)
        if is_forked:
            self._start(FORKER)
        if self.ledger.missing:
            self._start(COPIER)

    def run(self) -> None:
        """Play the schedule to its end and examine what is left; raises `Violation`."""
        with witnessed(self.ledger):
            while self.actors and self.step < LONGEST:
                self._advance(self._choose())
            for actor in self.actors:
                actor.is_dead = True
                if actor.greenlet:  # one that never began has nothing to leave
                    actor.greenlet.throw(Death)
            while self.late:
                self._arrive()
        examine(self.store, self.ledger)
        continue_run(self.store, self.ledger)

    def _start(self, role: Role) -> None:
        self.started += 1
        self.actors.append(Actor(self, role, self.started, f"{self.seed} {self.started}"))

    def _choose(self) -> Actor:
        awake = [actor for actor in self.actors if actor.asleep_until <= self.step] or self.actors
        actor = self.chance.choice(awake)
        if self.chance.random() < self.pause_rate:
            actor.asleep_until = self.step + self.chance.randint(5, 60)
        return actor

    def _advance(self, actor: Actor) -> None:
        self.step += 1
        if self.late and self.chance.random() < 0.05:
            self._arrive()
        fate = self._fate(actor)
        self.trace.append(f"{self.step:4} {actor.name}: {actor.pending}" + (f"  ← {fate.name}" if fate else ""))
        actor.greenlet.switch(*([] if actor.pending == "begin" else [fate]))
        if actor.greenlet.dead:
            self._bury(actor)

    def _fate(self, actor: Actor) -> Fault | None:
        if actor.pending == "begin":
            return None
        if actor.throttled:
            actor.throttled -= 1
            return None if actor.pending == "sleep" else Fault.THROTTLED
        if self.chance.random() >= self.fault_rate:
            return None
        fate = self.chance.choice(_FATES)
        if fate is Fault.BAD_READ:
            if actor.has_misread:
                return None
            actor.has_misread = True
        actor.throttled = FOLLOWING.get(fate, 0)
        actor.is_dead = fate in DEADLY
        return fate

    def _arrive(self) -> None:
        """Let one request of somebody dead arrive."""
        self.trace.append("     a late request arrives")
        self.late.pop(self.chance.randrange(len(self.late)))()

    def _bury(self, actor: Actor) -> None:
        self.trace.append(f"     {actor.name}: {actor.end}")
        self.actors.remove(actor)
        self.ledger.dead.add(actor.process.pid)
        if self.restarts:
            self.restarts -= 1
            self._start(self.chance.choice(ROLES))


def simulate(seed: int) -> Simulation:
    """Play one seed; a violation says which seed it was and what happened."""
    simulation = Simulation(seed)
    try:
        simulation.run()
    except Violation as violation:
        trace = "\n".join(simulation.trace)
        raise Violation(f"{violation} [CAIRN_SIMULATOR_SEED={seed}]\n{trace}") from violation
    return simulation
