"""What may be done to a run: kinds of faults, when each may strike, and which ends of an attempt it may explain."""

from dataclasses import dataclass
from enum import StrEnum


class Moment(StrEnum):
    """What the campaign waits to see before it injects, at the fault's step or later.

    `start` is while text becomes a snapshot, the run is opened and first claimed; `resume` while a later attempt is;
    `early` is a part of the first three seconds of a command.
    """

    START = "start"
    EARLY = "early"
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
    KILL_LAUNCHER = "kill-launcher"
    KILL_EVALUATOR = "kill-evaluator"
    KILL_SERVER = "kill-server"
    KILL_OWN_SERVER = "kill-own-server"
    KILL_WATCHER = "kill-watcher"
    KILL_WORKER = "kill-worker"
    KILL_SWEEP = "kill-sweep"
    NOTICE = "notice"
    NOTICE_WITHOUT_GRACE = "notice-without-grace"
    ZOMBIE = "zombie"
    FULL_DISK = "full-disk"
    STORE_AWAY = "store-away"
    STORE_THROTTLED = "store-throttled"
    STORE_LOSES_ANSWERS = "store-loses-answers"
    STORE_REFUSES = "store-refuses"
    STORE_IS_LATE = "store-is-late"
    STORE_MISREADS = "store-misreads"
    FSYNC_FAILS = "fsync-fails"
    FLIP_CHECKPOINT = "flip-checkpoint"
    FLIP_DATA = "flip-data"
    CLOCK_BACK = "clock-back"
    CLOCK_FORWARD = "clock-forward"
    TWO_FLOWS = "two-flows"
    WRONG_DEAD = "wrong-dead"
    VERSION_SKEW = "version-skew"
    OUT_OF_MEMORY = "out-of-memory"


_RUNNING = (Moment.STEP, Moment.COMMIT)
_RUNNING_OR_RESUMED = (*_RUNNING, Moment.RESUME)
_ANY = (*_RUNNING_OR_RESUMED, Moment.EVALUATION, Moment.SWEEP)
_ALWAYS = (Moment.START, *_ANY)
_LOST, _PREEMPTED, _STORAGE = frozenset({"lost"}), frozenset({"preempted"}), frozenset({"storage"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The moments of a kind, the ends that it may explain besides `completed`, and its weight where kinds are drawn."""

    moments: tuple[Moment, ...]
    reasons: frozenset[str] = frozenset()
    weight: int = 1


FACTS: dict[Kind, Facts] = {
    Kind.KILL_TRAINER: Facts(moments=_RUNNING_OR_RESUMED, reasons=_LOST, weight=6),
    Kind.KILL_FLOW: Facts(moments=_ALWAYS, reasons=_LOST, weight=5),
    Kind.KILL_BOTH: Facts(moments=_ANY, reasons=_LOST, weight=5),
    Kind.KILL_LAUNCHER: Facts(moments=_RUNNING_OR_RESUMED, reasons=_LOST, weight=10),
    Kind.KILL_EVALUATOR: Facts(moments=(Moment.EVALUATION,), weight=6),
    Kind.KILL_SERVER: Facts(moments=_ALWAYS),
    Kind.KILL_OWN_SERVER: Facts(moments=_ALWAYS, weight=6),
    Kind.KILL_WATCHER: Facts(moments=_RUNNING_OR_RESUMED, weight=2),
    Kind.KILL_WORKER: Facts(moments=_ALWAYS, weight=3),
    Kind.KILL_SWEEP: Facts(moments=(Moment.STEP, Moment.RESUME), weight=2),
    Kind.NOTICE: Facts(moments=_ANY, reasons=_PREEMPTED, weight=3),
    Kind.NOTICE_WITHOUT_GRACE: Facts(moments=(*_RUNNING, Moment.EVALUATION), reasons=_PREEMPTED | _LOST),
    Kind.ZOMBIE: Facts(moments=_ANY, reasons=_LOST),
    Kind.FULL_DISK: Facts(moments=_ALWAYS, reasons=_STORAGE),
    Kind.STORE_AWAY: Facts(moments=_ALWAYS, reasons=_STORAGE, weight=4),
    Kind.STORE_THROTTLED: Facts(moments=_ANY, reasons=_STORAGE, weight=4),
    Kind.STORE_LOSES_ANSWERS: Facts(moments=_ANY, reasons=_STORAGE, weight=4),
    Kind.STORE_REFUSES: Facts(moments=_ANY, reasons=_STORAGE | _LOST),
    Kind.STORE_IS_LATE: Facts(moments=_RUNNING, reasons=_LOST, weight=4),
    Kind.STORE_MISREADS: Facts(moments=(Moment.STEP,), reasons=_LOST, weight=2),
    Kind.FSYNC_FAILS: Facts(moments=_RUNNING, reasons=_LOST | _STORAGE),
    Kind.FLIP_CHECKPOINT: Facts(moments=(Moment.STEP,), reasons=_LOST | _STORAGE),
    Kind.FLIP_DATA: Facts(moments=(Moment.STEP,), reasons=_LOST | {"bad-data"}),
    Kind.CLOCK_BACK: Facts(moments=_RUNNING, reasons=_LOST),
    Kind.CLOCK_FORWARD: Facts(moments=_RUNNING, reasons=_LOST),
    Kind.TWO_FLOWS: Facts(moments=_RUNNING, reasons=_LOST),
    Kind.WRONG_DEAD: Facts(moments=(*_RUNNING, Moment.EVALUATION)),
    Kind.VERSION_SKEW: Facts(moments=(Moment.STEP,)),
    Kind.OUT_OF_MEMORY: Facts(moments=(Moment.STEP,), reasons=_LOST | {"oom"}),
}
KILLS = frozenset(kind for kind in Kind if kind.startswith("kill-")) - {Kind.KILL_SERVER, Kind.KILL_SWEEP}
"""Kinds that strike a process which is halted as surely as one that runs."""
ENDING = frozenset(kind for kind, facts in FACTS.items() if facts.reasons - _STORAGE)
"""After these the run is resumed, so that a resume can be struck next."""
SILENCES = frozenset({Kind.FULL_DISK, Kind.STORE_AWAY})
"""Who cannot show life for longer than the lease is lost to another flow of the run, where one is known to wait."""
LIES_IN_WAIT = frozenset({Kind.FLIP_DATA, Kind.FLIP_CHECKPOINT, Kind.OUT_OF_MEMORY, Kind.FSYNC_FAILS})
"""Met by the attempt that comes next, or by the first after it that lives to see it."""
