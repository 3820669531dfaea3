"""What is done to a run, and at which observed moment: a pure function of the run's seed.

Owns the kinds of faults, the moments each may strike at, and the drawing. Refuses to know processes: whether a fault
can be done on this machine is found out where it is done, so that a seed means the same plan everywhere.
"""

import random
from dataclasses import dataclass, replace
from enum import StrEnum

STEPS = 80
LAST_STRUCK_STEP = 74
FAULTS_PER_RUN = 12


class Moment(StrEnum):
    """What the campaign waits to see before it strikes, at the fault's step or later."""

    STEP = "step"
    COMMIT = "commit"
    RESUME = "resume"
    EVALUATION = "evaluation"
    PROMOTION = "promotion"
    SWEEP = "sweep"


class Kind(StrEnum):
    """What is done; each name says who suffers."""

    KILL_TRAINER = "kill-trainer"
    KILL_FLOW = "kill-flow"
    KILL_BOTH = "kill-both"
    KILL_EVALUATOR = "kill-evaluator"
    KILL_SERVER = "kill-server"
    KILL_WATCHER = "kill-watcher"
    NOTICE = "notice"
    NOTICE_WITHOUT_GRACE = "notice-without-grace"
    ZOMBIE = "zombie"
    FULL_DISK = "full-disk"
    STORE_AWAY = "store-away"
    STORE_THROTTLED = "store-throttled"
    STORE_LOSES_ANSWERS = "store-loses-answers"
    FLIP_CHECKPOINT = "flip-checkpoint"
    FLIP_DATA = "flip-data"
    CLOCK_BACK = "clock-back"
    CLOCK_FORWARD = "clock-forward"
    TWO_FLOWS = "two-flows"


_RUNNING = (Moment.STEP, Moment.COMMIT)
_ANY = (*_RUNNING, Moment.RESUME, Moment.EVALUATION, Moment.SWEEP)
MOMENTS: dict[Kind, tuple[Moment, ...]] = {
    Kind.KILL_TRAINER: (*_RUNNING, Moment.RESUME),
    Kind.KILL_FLOW: _ANY,
    Kind.KILL_BOTH: _ANY,
    Kind.KILL_EVALUATOR: (Moment.EVALUATION,),
    Kind.KILL_SERVER: _RUNNING,
    Kind.KILL_WATCHER: (*_RUNNING, Moment.RESUME),
    Kind.NOTICE: _ANY,
    Kind.NOTICE_WITHOUT_GRACE: _RUNNING,
    Kind.ZOMBIE: _RUNNING,
    Kind.FULL_DISK: _RUNNING,
    Kind.STORE_AWAY: _RUNNING,
    Kind.STORE_THROTTLED: _RUNNING,
    Kind.STORE_LOSES_ANSWERS: _RUNNING,
    Kind.FLIP_CHECKPOINT: (Moment.STEP,),
    Kind.FLIP_DATA: (Moment.STEP,),
    Kind.CLOCK_BACK: _RUNNING,
    Kind.CLOCK_FORWARD: _RUNNING,
    Kind.TWO_FLOWS: _RUNNING,
}
WEIGHTS: dict[Kind, int] = {
    Kind.KILL_TRAINER: 6,
    Kind.KILL_FLOW: 5,
    Kind.KILL_BOTH: 5,
    Kind.NOTICE: 3,
    Kind.STORE_AWAY: 4,
    Kind.STORE_THROTTLED: 4,
    Kind.STORE_LOSES_ANSWERS: 4,
}
EARLIEST: dict[Kind | Moment, int] = {Kind.FLIP_CHECKPOINT: 12, Moment.SWEEP: 16, Moment.EVALUATION: 16}
"""Before these steps there are not two checkpoints, nothing to sweep, and nothing to evaluate."""
ENDING: frozenset[Kind] = frozenset(
    {
        Kind.KILL_TRAINER,
        Kind.KILL_FLOW,
        Kind.KILL_BOTH,
        Kind.NOTICE,
        Kind.NOTICE_WITHOUT_GRACE,
        Kind.ZOMBIE,
        Kind.FLIP_CHECKPOINT,
        Kind.FLIP_DATA,
        Kind.CLOCK_BACK,
        Kind.CLOCK_FORWARD,
        Kind.TWO_FLOWS,
    }
)
"""After these the run is resumed, so that a resume can be struck next."""
AT_THE_END = (Kind.KILL_FLOW, Kind.KILL_BOTH, Kind.NOTICE, Kind.KILL_SERVER)
_ONLY_LOCAL = frozenset({Kind.FULL_DISK})
_ONLY_S3 = frozenset({Kind.STORE_AWAY, Kind.STORE_THROTTLED, Kind.STORE_LOSES_ANSWERS})


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault: what is done, at which moment, not before which step."""

    kind: Kind
    moment: Moment
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Everything that is done to one run; `driver` is who continues it: the same command, or `cairn watch`."""

    seed: int
    store: str
    driver: str
    faults: tuple[Fault, ...]


def plan_run(seed: int, *, store: str, faults: int = FAULTS_PER_RUN) -> RunPlan:
    """Return the plan of one run: faults in step order, now and then one between the last step and the promotion."""
    chance = random.Random(f"{seed} {store}")
    driver = chance.choice(("command", "command", "watch"))
    kinds = possible_kinds(store, driver)
    drawn = chance.choices(kinds, [WEIGHTS.get(kind, 1) for kind in kinds], k=faults)
    planned = sorted((_drawn(chance, kind) for kind in drawn), key=lambda fault: fault.step)
    for place, fault in enumerate(planned):
        if fault.moment is Moment.RESUME and (place == 0 or planned[place - 1].kind not in ENDING):
            planned[place] = replace(fault, moment=Moment.STEP)
    if chance.random() < 0.5:
        planned.append(Fault(kind=chance.choice(AT_THE_END), moment=Moment.PROMOTION, step=STEPS))
    return RunPlan(seed=seed, store=store, driver=driver, faults=tuple(planned))


def _drawn(chance: random.Random, kind: Kind) -> Fault:
    moment = chance.choice(MOMENTS[kind])
    earliest = max(EARLIEST.get(kind, 1), EARLIEST.get(moment, 1))
    return Fault(kind=kind, moment=moment, step=chance.randrange(earliest, LAST_STRUCK_STEP))


def possible_kinds(store: str, driver: str) -> list[Kind]:
    """Return the kinds that mean something for a run on this store, continued by this driver."""
    without = (_ONLY_S3 if store == "local" else _ONLY_LOCAL) | (set() if driver == "watch" else {Kind.KILL_WATCHER})
    return [kind for kind in Kind if kind not in without]
