"""The faults of one run and the moments they are injected at: a pure function of the run's seed.

Whether a machine can do a fault is found out where it is done, so that a seed means the same plan everywhere.
"""

import random
from dataclasses import dataclass, replace

from tests.programs.chaos.kinds import ENDING, FACTS, Kind, Moment

STEPS = 80
LAST_STRUCK_STEP = 74
FAULTS_PER_RUN = 18
EARLY_SECONDS = 3.0
COMMITS_PER_EVALUATION, EVALUATED_STEPS = 4, 20


EARLIEST: dict[Kind | Moment, int] = {
    Kind.FLIP_CHECKPOINT: 12,
    Kind.STORE_MISREADS: 12,
    Kind.VERSION_SKEW: 6,
    Kind.KILL_SWEEP: 20,
    Moment.SWEEP: 16,
    Moment.EVALUATION: 16,
}
"""Before these steps there are not two checkpoints, nothing to sweep, and nothing to evaluate."""
STARTING = frozenset(
    {Kind.KILL_FLOW, Kind.KILL_BOTH, Kind.NOTICE, Kind.NOTICE_WITHOUT_GRACE, Kind.STORE_IS_LATE, Kind.TWO_FLOWS}
)
"""After these a command is started to which nothing else is done, so that its start can be struck next."""
EARLY_KINDS = (Kind.KILL_FLOW, Kind.KILL_FLOW, Kind.KILL_BOTH, Kind.KILL_BOTH, Kind.NOTICE)
AT_THE_END = (
    Kind.KILL_FLOW,
    Kind.KILL_BOTH,
    Kind.KILL_EVALUATOR,
    Kind.KILL_SERVER,
    Kind.KILL_OWN_SERVER,
    Kind.KILL_WORKER,
    Kind.NOTICE,
    Kind.ZOMBIE,
    Kind.FULL_DISK,
    Kind.STORE_AWAY,
)
"""What may fault between the last step and the promotion, where it means something for the run."""
_ONLY_LOCAL = frozenset({Kind.FULL_DISK, Kind.FSYNC_FAILS, Kind.VERSION_SKEW})
_ONLY_S3 = frozenset(kind for kind in Kind if kind.startswith("store-"))
STORES = ("local", "s3", "ceph", "gs", "az", "azurite")
COMMAND, WATCH, WORKER = "command", "watch", "worker"
_NOT_FOR: dict[str, frozenset[Kind]] = {
    COMMAND: frozenset({Kind.KILL_WATCHER, Kind.KILL_WORKER}),
    WATCH: frozenset({Kind.KILL_WORKER, Kind.KILL_OWN_SERVER}),
    WORKER: frozenset({Kind.KILL_OWN_SERVER}),
}
_SPOILED_SHARE, _OWN_SERVER_SHARE, _SEVERAL_SHARE, _EARLY_SHARE, _EARLY_AGAIN_SHARE = 0.2, 0.5, 0.6, 1.0, 0.65
_FIRST_SPOILED_STEP, _LAST_SPOILED_STEP = 10, 60
_LATEST_EARLY_SECONDS = 2.5  # a look takes a while on a busy machine
_LAST_EVALUATED_STEP = STEPS - EVALUATED_STEPS


class Skipped(Exception):
    """This fault cannot be done here, or not now; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault: what is done, at which moment, not before which step, and at which age of a command if it is early."""

    kind: Kind
    moment: Moment
    step: int
    age_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Everything that is done to one run.

    `driver` is who continues it: the same command, `cairn watch`, or `cairn watch` with a deployment and its worker;
    `processes` train it.
    `spoiled_step` is the step whose first sample no model can learn from, though every hash is right.
    """

    seed: int
    store: str
    driver: str
    faults: tuple[Fault, ...]
    spoiled_step: int | None = None
    processes: int = 1

    @property
    def has_own_server(self) -> bool:
        """Whether its commands start a Prefect server each, as they do where none is named."""
        return any(fault.kind is Kind.KILL_OWN_SERVER for fault in self.faults)


def plan_run(seed: int, *, store: str, faults: int = FAULTS_PER_RUN, driver: str = "") -> RunPlan:
    """Return the plan of one run: faults in step order, now and then one between the last step and the promotion."""
    chance = random.Random(f"{seed} {store}")
    driver = driver or chance.choice((COMMAND, COMMAND, WATCH, WORKER))
    spoiled = chance.randrange(_FIRST_SPOILED_STEP, _LAST_SPOILED_STEP) if chance.random() < _SPOILED_SHARE else None
    processes = 1 + (chance.random() < _SEVERAL_SHARE)
    kinds = possible_kinds(store, driver, is_spoiled=spoiled is not None, processes=processes)
    if driver == COMMAND:
        kinds.remove(Kind.KILL_SERVER if chance.random() < _OWN_SERVER_SHARE else Kind.KILL_OWN_SERVER)
    drawn = chance.choices(kinds, [FACTS[kind].weight for kind in kinds], k=faults)
    planned = sorted((_drawn(chance, kind) for kind in drawn), key=lambda fault: fault.step)
    for place, fault in enumerate(planned):
        if fault.moment is Moment.RESUME and (place == 0 or planned[place - 1].kind not in ENDING):
            planned[place] = replace(fault, moment=Moment.STEP)
        if chance.random() < _early_share(planned[place - 1] if place else None, driver):
            planned[place] = _early(chance, planned[place - 1].step if place else 0)
    if chance.random() < 0.5:
        last = chance.choice([kind for kind in AT_THE_END if kind in kinds])
        planned.append(Fault(kind=last, moment=Moment.PROMOTION, step=STEPS))
    return RunPlan(
        seed=seed,
        store=store,
        driver=driver,
        faults=tuple(planned),
        spoiled_step=spoiled,
        processes=processes,
    )


def _early_share(before: Fault | None, driver: str) -> float:
    """Return how often the start that a fault causes is struck: again and again only where no watcher waits longer."""
    if before is not None and before.kind not in STARTING:
        return 0.0
    is_again = before is not None and before.moment is Moment.EARLY
    return _EARLY_SHARE if not is_again else _EARLY_AGAIN_SHARE if driver == COMMAND else 0.0


def _early(chance: random.Random, step: int) -> Fault:
    """Return a kill or a notice at the next start."""
    age = round(chance.uniform(0.0, _LATEST_EARLY_SECONDS), 3)
    return Fault(kind=chance.choice(EARLY_KINDS), moment=Moment.EARLY, step=step, age_seconds=age)


def _drawn(chance: random.Random, kind: Kind) -> Fault:
    moment = chance.choice(FACTS[kind].moments)
    if moment is Moment.START:
        return Fault(kind=kind, moment=moment, step=0)
    earliest = max(EARLIEST.get(kind, 1), EARLIEST.get(moment, 1))
    latest = _LAST_EVALUATED_STEP if moment is Moment.EVALUATION else LAST_STRUCK_STEP
    return Fault(kind=kind, moment=moment, step=chance.randrange(earliest, latest))


def possible_kinds(store: str, driver: str, *, is_spoiled: bool = False, processes: int = 2) -> list[Kind]:
    """Return the kinds that mean something for a run on this store, continued by this driver.

    A spoiled snapshot is not what its text comes to, so nothing of it can be made anew where a byte flips. Only several
    processes have a launcher.
    """
    without = (_ONLY_S3 if store == "local" else _ONLY_LOCAL) | _NOT_FOR[driver]
    without |= {Kind.FLIP_DATA} if is_spoiled else set()
    without |= {Kind.KILL_LAUNCHER} if processes == 1 else set()
    return [kind for kind in Kind if kind not in without]
