"""Which ends of an attempt each fault may explain, and which faults explain an end of the attempt that comes later."""

from tests.programs.chaos.plan import Kind

LOST, PREEMPTED, STORAGE = "lost", "preempted", "storage"
REASONS: dict[Kind, frozenset[str]] = {
    Kind.KILL_TRAINER: frozenset({LOST}),
    Kind.KILL_FLOW: frozenset({LOST}),
    Kind.KILL_BOTH: frozenset({LOST}),
    Kind.KILL_LAUNCHER: frozenset({LOST}),
    Kind.NOTICE: frozenset({PREEMPTED}),
    Kind.NOTICE_WITHOUT_GRACE: frozenset({PREEMPTED, LOST}),
    Kind.ZOMBIE: frozenset({LOST}),
    Kind.FULL_DISK: frozenset({STORAGE}),
    Kind.STORE_AWAY: frozenset({STORAGE}),
    Kind.STORE_THROTTLED: frozenset({STORAGE}),
    Kind.STORE_LOSES_ANSWERS: frozenset({STORAGE}),
    Kind.STORE_REFUSES: frozenset({STORAGE, LOST}),
    Kind.STORE_IS_LATE: frozenset({LOST}),
    Kind.STORE_MISREADS: frozenset({LOST}),
    Kind.FSYNC_FAILS: frozenset({LOST, STORAGE}),
    Kind.FLIP_CHECKPOINT: frozenset({LOST, STORAGE}),
    Kind.FLIP_DATA: frozenset({LOST, "bad-data"}),
    Kind.CLOCK_BACK: frozenset({LOST}),
    Kind.CLOCK_FORWARD: frozenset({LOST}),
    Kind.TWO_FLOWS: frozenset({LOST}),
    Kind.OUT_OF_MEMORY: frozenset({LOST, "oom"}),
}
"""Besides completed. What is not here explains no end at all."""
SILENCES = frozenset({Kind.FULL_DISK, Kind.STORE_AWAY})
"""Who cannot show life for longer than the lease is lost to another flow of the run, where one is known to wait."""
LIES_IN_WAIT = frozenset({Kind.FLIP_DATA, Kind.FLIP_CHECKPOINT, Kind.OUT_OF_MEMORY, Kind.FSYNC_FAILS})
"""Met by the attempt that comes next, or by the first after it that lives to see it."""
