"""Every fault at every operation of every scenario, and what each case must come to.

Owns which cases there are. Nothing is listed by hand: a scenario is first run to count its operations, then once for
each operation and fault that differs there.
"""

import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

from tests.full_amount import share_of
from tests.protocol import processes
from tests.protocol.forks import FORKS
from tests.protocol.holes import HOLES
from tests.protocol.invariants import continue_run, examine
from tests.protocol.processes import REFUSALS, Act, Process
from tests.protocol.quick_world import witnessed
from tests.protocol.raw_history import Violation, require
from tests.protocol.scenarios import SCENARIOS, Scenario
from tests.protocol.world import Copies
from tests.storage.faulty_store import ArrivingStore, Death, Fault, FaultyStore, applies


def take_over(process: Process) -> None:
    """Claim the run, whoever owns it, commit and go on living."""
    log = process.log()
    if log.refresh().opened is None:
        return
    number = processes.claim(process, log).attempt
    step = log.state.high_water_step + 1
    processes.commit(process, log, processes.stage(process, step=step, attempt=number))


def promote_oldest(process: Process) -> None:
    """Offer the oldest readable checkpoint that is evaluated."""
    state = process.log().refresh()
    wanted = {item.manifest_sha256 for item in state.evaluations}
    found = [record.committed.prefix for record in state.readable if record.committed.manifest_sha256 in wanted]
    if found:
        processes.promote(process, found[-1])


def take_over_and_sweep(process: Process) -> None:
    """What could hurt most: a newer commit, after which everything older looks free."""
    take_over(process)
    processes.sweep(process)


@dataclass(frozen=True)
class Trouble:
    """A fault, for a slow operation who acts first, and whether power fails once the process has ended."""

    name: str
    fault: Fault
    rival: Act | None = None
    power_cut: bool = False


TROUBLES = (
    *(Trouble(fault.name.lower(), fault) for fault in Fault if fault is not Fault.SLOW),
    Trouble("not_durable_and_a_power_cut", Fault.NOT_DURABLE, power_cut=True),
    Trouble("slow_while_taken_over", Fault.SLOW, take_over),
    Trouble("slow_while_swept", Fault.SLOW, processes.sweep),
    Trouble("slow_while_promoted", Fault.SLOW, promote_oldest),
    Trouble("slow_while_taken_over_and_swept", Fault.SLOW, take_over_and_sweep),
)
ALL_SCENARIOS = (*SCENARIOS, *FORKS, *HOLES)
LATEST = 24
"""A late request arrives before one of so many first operations of whoever goes on."""
# One of these at the entry's own PUT must be settled, and the scenario acknowledged.
SETTLED = frozenset({Fault.ERROR_BEFORE, Fault.RESPONSE_LOST, Fault.THROTTLED})


@dataclass(frozen=True)
class Case:
    """One operation of one scenario under one trouble."""

    scenario: Scenario
    trouble: Trouble
    at: int
    operation: str

    def __str__(self) -> str:
        return f"{self.scenario.name}: {self.trouble.name} at operation {self.at} ({self.operation})"


def operations(scenario: Scenario, copies: Copies) -> FaultyStore:
    """Run the scenario without a fault; returns the store that counted its operations."""
    counting = FaultyStore(copies.fresh())  # type: ignore[arg-type]
    scenario.act(Process(store=counting, ledger=deepcopy(copies.snapshot.ledger)))
    return counting


def default_cases(scenario: Scenario, copies: Copies) -> Iterator[Case]:
    """Yield all cases in the full amount, else one of each of the troubles that the scenario's name draws."""
    found = list(all_cases(scenario, copies))
    one_in = share_of({"memory": 250, "local": 1000}.get(copies.kind, 48))
    if one_in == 1:
        yield from found
        return
    chance = random.Random(f"{scenario.name} {copies.kind}")
    troubles = list(dict.fromkeys(case.trouble for case in found))
    for trouble in chance.sample(troubles, min(len(troubles), len(found) // one_in + 1)):
        yield chance.choice([case for case in found if case.trouble == trouble])


def all_cases(scenario: Scenario, copies: Copies) -> Iterator[Case]:
    """Yield every case that differs."""
    counted = operations(scenario, copies)
    for trouble in TROUBLES:
        for at, name in enumerate(counted.operations):
            key, store = counted.keys_asked[at], counted.inner.inner  # type: ignore[attr-defined]
            if applies(trouble.fault, name, store, key):
                yield Case(scenario, trouble, at, f"{name} {key}")


def run_case(case: Case, copies: Copies) -> None:
    """Run one case and examine what is left; raises `Violation`, naming the case, where something does not hold."""
    survivor, ledger = copies.fresh(), deepcopy(copies.snapshot.ledger)
    rival = case.trouble.rival
    faulty = FaultyStore(
        survivor,  # type: ignore[arg-type]
        case.trouble.fault,
        case.at,
        rival=None if rival is None else lambda store: processes.attempt(rival, Process(store, ledger, host="rival")),
    )
    try:
        with witnessed(ledger):
            _act(case, Process(store=faulty, ledger=ledger, host="victim"))
        require(faulty.fired, "deterministic", "the operation was not reached")
        if case.trouble.power_cut:
            survivor.inner.delete(faulty.keys_asked[case.at])
        examine(survivor, ledger)
        arriving = ArrivingStore(survivor, faulty.late, at=case.at * 7 % LATEST) if faulty.late else None
        continue_run(survivor, ledger, seen_as=arriving)
    except Violation as violation:
        raise Violation(f"{violation} [{case}]") from violation


def _act(case: Case, process: Process) -> None:
    try:
        case.scenario.act(process)
    except Death:
        return
    except REFUSALS as error:
        settled = case.trouble.fault in SETTLED and case.operation.startswith("create ")
        require(not settled, "an append is settled", f"{type(error).__name__}: {error}")
