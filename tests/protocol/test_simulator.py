"""Seeded schedules of trainers, evaluator, promoter, sweeper and deleter on one store.

`CAIRN_SIMULATOR_SEED=n` replays one seed and prints its trace; `CAIRN_SIMULATOR_SCHEDULES=n` plays that many.
`make test-full` plays thousands.
"""

import os
from collections.abc import Callable
from functools import cache
from itertools import islice

import pytest

from tests.full_amount import FULL
from tests.protocol.holes import HOLES
from tests.protocol.simulator import FORK_WORLDS, Simulation, simulate

SCHEDULES = int(os.environ.get("CAIRN_SIMULATOR_SCHEDULES", "6000" if FULL else "140"))
SEED = os.environ.get("CAIRN_SIMULATOR_SEED")
CHUNKS = 12


@cache
def played(seed: int) -> tuple[tuple[str, ...], bool]:
    """Return the trace of a seed's schedule, and whether it took somebody living for dead; each is played once."""
    simulation: Simulation = simulate(seed)
    return tuple(simulation.trace), bool(simulation.ledger.mourned)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_schedule_breaks_an_invariant(chunk: int, record_property: Callable[[str, object], None]) -> None:
    seeds = range(chunk, SCHEDULES, CHUNKS)
    for seed in seeds:
        played(seed)
    record_property("protocol_schedules", len(seeds))


@pytest.mark.skipif(SEED is None, reason="replays the seed in CAIRN_SIMULATOR_SEED")
def test_the_named_seed() -> None:
    print("\n".join(simulate(int(SEED or 0)).trace))


def test_a_seed_gives_the_same_schedule_every_time() -> None:
    for seed in range(8):
        assert tuple(simulate(seed).trace) == played(seed)[0]


def test_schedules_let_every_role_finish_fail_and_die() -> None:
    ends: set[str] = set()
    roles = ("trainer", "evaluator", "promoter", "sweeper", "deleter", "forker", "copier")
    wanted = {f"{role} {end}" for role in roles for end in ("done", "dead", "StoreUnavailable")}
    wanted |= {"trainer Fenced", "trainer LiveOwner", "evaluator CheckpointGone"}
    wanted |= {"deleter LiveOwner", "deleter GateRefused", "trainer InvalidConfiguration", "trainer IntegrityError"}
    for seed in range(300):
        if wanted <= ends:
            break
        for line in played(seed)[0]:
            name, _, end = line.strip().partition(": ")
            if line.startswith("     "):
                ends.add(f"{name.split('-')[0]} {end.split(':')[0]}")
    assert wanted - ends == set()


def test_schedules_begin_in_every_world_with_a_hole_a_pin_a_fork_or_a_deleted_parent() -> None:
    worlds = {simulation.trace[0] for simulation in map(Simulation, range(SCHEDULES))}
    assert {f"world: {item.world}" for item in (*HOLES, *FORK_WORLDS)} - worlds == set()


def test_schedules_take_living_owners_and_holders_for_dead() -> None:
    mourning = (seed for seed in range(100) if played(seed)[1])
    assert len(list(islice(mourning, 10))) == 10
