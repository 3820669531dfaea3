"""Every operation of Cairn on a store, by name: the world before it, and what one process does.

Owns the list. A scenario is run with every fault at every one of its operations by `enumeration`; that each kind of
entry and each method of the store is used by one of them is itself tested.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count

import cairn.storage.checkpoints.resume_point as resume_point
from cairn.storage.checkpoints.checkpoint import checkpoint_target
from cairn.storage.errors import WriterTooOld
from cairn.storage.logs.registry import Registry
from cairn.storage.logs.run_entries import ReadEvidence
from cairn.storage.logs.run_index import list_run_ids
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.errors import LiveOwner
from cairn.tasks.evaluator.evaluator_process import Outcome
from tests.memory_store import MemoryStore
from tests.protocol import processes
from tests.protocol.processes import PREFIX, Act, EventfulClock, Process, measured
from tests.protocol.raw_history import Violation, tell_run
from tests.protocol.world import Ledger, Snapshot, WatchedStore, as_store, take_snapshot
from tests.storage.builders import RUN, append_as_a_newer_program, flip_bit
from tests.storage.faulty_store import Death, Fault, FaultyStore


@dataclass(frozen=True)
class Scenario:
    """`before` makes the world; `act` is what the process does that everything happens to."""

    name: str
    before: Act
    act: Act

    @property
    def world(self) -> str:
        """The name of the world before it: of the function that makes it, or, where that has arguments, its own."""
        return getattr(self.before, "__name__", self.name)


def at(step: int, attempt: int = 1) -> str:
    """Return the folder of a checkpoint of the run."""
    return checkpoint_target(RUN, step=step, attempt=attempt).prefix


def nothing(process: Process) -> None:
    """Leave the store empty."""


def opened(process: Process) -> None:
    """The run is open."""
    processes.open_run(process)


def training(process: Process) -> tuple[RunLog, int]:
    """Attempt 1 owns the run and has committed steps 1 and 2."""
    processes.open_run(process)
    log = process.log()
    number = processes.claim(process, log).attempt
    for step in (1, 2):
        processes.commit(process, log, processes.stage(process, step=step, attempt=number))
    return log, number


def owned(process: Process) -> None:
    training(process)


def staged(process: Process) -> None:
    """Besides, step 3 is staged."""
    _, number = training(process)
    processes.stage(process, step=3, attempt=number)


def ended(process: Process) -> None:
    """Attempt 1 committed two checkpoints and ended."""
    log, number = training(process)
    processes.end_attempt(process, log, number)


def evaluated(process: Process) -> None:
    """Both checkpoints are evaluated, the second is better; the attempt has ended."""
    ended(process)
    for step in (1, 2):
        processes.evaluate(process, at(step), measured(1 / step), None)


def promoted(process: Process) -> None:
    """The first, then the second checkpoint became champion."""
    evaluated(process)
    for step in (1, 2):
        processes.promote(process, at(step))


def second_is_broken(process: Process) -> None:
    """One bit of the newest checkpoint has flipped and nobody has noticed."""
    ended(process)
    break_checkpoint(process, at(2))


def second_is_condemned(process: Process) -> None:
    """A sick host has quarantined the newest checkpoint, which is sound."""
    ended(process)
    condemn(process, at(2))
    process.ledger.condemned.add(at(2))


def condemn(process: Process, prefix: str) -> None:
    """Quarantine a checkpoint as a host does that reads it wrongly every time."""
    log = process.log()
    record = log.refresh().find(prefix)
    assert record is not None
    key = f"{prefix}/trainer.json"
    evidence = (ReadEvidence(key=key, expected="a", found="sha256 is b", reads=3, host="sick"),)
    resume_point.quarantine_checkpoint(log, record.committed, "b", evidence=evidence, writer=process.writer())


def condemned_and_aged(process: Process) -> None:
    """Of four checkpoints the first is quarantined though it is sound, the second because it is not."""
    log, number = training(process)
    for step in (3, 4):
        processes.commit(process, log, processes.stage(process, step=step, attempt=number))
    processes.end_attempt(process, log, number)
    condemn(process, at(1))
    condemn(process, at(2))
    flip_bit(as_store(process.store), f"{at(2)}/trainer.json")
    process.ledger.broken.add(at(2))
    process.ledger.condemned.add(at(1))


def taken_over_by_a_newer_program(process: Process) -> None:
    """Step 3 is staged, and a program of tomorrow has claimed the run."""
    staged(process)
    append_as_a_newer_program(as_store(process.store), kind="attempt-started", version=2)


def break_checkpoint(process: Process, prefix: str) -> None:
    """Flip one bit of the trainer document."""
    flip_bit(as_store(process.store), f"{prefix}/trainer.json")
    process.ledger.broken.add(prefix)
    process.ledger.keep_last = 2  # whoever keeps one checkpoint loses all when that one rots unseen


def aged(process: Process) -> None:
    """Four checkpoints, the oldest a champion; torn uploads of an ended and of the open attempt."""
    promoted_oldest(process)
    second = process.log()
    number = processes.claim(process, second).attempt
    for step in (3, 4):
        processes.commit(process, second, processes.stage(process, step=step, attempt=number))
    processes.end_attempt(process, second, number)
    tear_staging(process, step=5, attempt=number)
    third = process.log()
    number = processes.claim(process, third).attempt
    tear_staging(process, step=6, attempt=number)


def promoted_oldest(process: Process) -> None:
    """Two checkpoints; the older one is champion."""
    evaluated(process)
    processes.promote(process, at(1))


def tear_staging(process: Process, *, step: int, attempt: int) -> None:
    """Die while uploading the second object of a checkpoint."""
    dying = Process(store=FaultyStore(process.store, Fault.TORN_DEATH, 1), ledger=process.ledger)
    try:
        processes.stage(dying, step=step, attempt=attempt)
    except Death:
        return
    raise AssertionError("the upload was not torn")


def torn_and_ended(process: Process) -> None:
    """The second of two checkpoints is quarantined though it is sound; a third was torn; an owner is silent."""
    log, number = training(process)
    condemn(process, at(2))
    process.ledger.condemned.add(at(2))
    processes.commit(process, log, processes.stage(process, step=3, attempt=number))
    tear_staging(process, step=4, attempt=number)


def left_by_its_alias(process: Process) -> None:
    """Both checkpoints were champions; by now two of another run are."""
    promoted(process)
    for step in (1, 2):
        promote_foreign(process, step)


def promote_foreign(process: Process, step: int) -> None:
    """Point the alias at a checkpoint of a run that nobody looks at."""
    registry = Registry(as_store(process.store), processes.ALIAS)
    champion = registry.refresh().champion
    assert champion is not None
    foreign = {"run_id": "r2", "step": step, "prefix": at(step).replace(RUN, "r2"), "manifest_sha256": f"{step:064x}"}
    body = replace(champion, **foreign, pin_id=None, previous=champion.manifest_sha256)
    registry.append(lambda state: body)


def poisoned_cache(process: Process) -> None:
    """The folded cache is whole, but of another run's history."""
    other = Process(store=WatchedStore(MemoryStore("other")), ledger=Ledger())
    promoted_oldest(other)
    promoted_oldest(process)
    processes.train(process, commits=1)
    key = f"{PREFIX}/fold.json"
    process.store.write(key, other.store.read(key))


def act_stage_and_commit(process: Process) -> None:
    processes.beat(process, 1, 3)
    processes.commit(process, process.log(), processes.stage(process, step=3, attempt=1))


def act_commit(process: Process) -> None:
    """Commit what is staged; what is staged is what staging it again would give."""
    aside = Process(store=WatchedStore(MemoryStore("aside")), ledger=process.ledger)
    processes.commit(process, process.log(), processes.stage(aside, step=3, attempt=1))


def act_evaluate_beside_another(process: Process) -> None:
    """While it reads, another process evaluates the same checkpoint to its end, and then a sweep needs the room."""

    def meanwhile() -> None:
        processes.evaluate(beside(process), at(1), measured(0.5), None)
        processes.sweep(beside(process))

    processes.evaluate(process, at(1), measured(0.5), None, meanwhile)


def beside(process: Process) -> Process:
    """Another process on the same store, to which nothing happens."""
    return Process(store=process.store.inner, ledger=process.ledger, host="beside")


def act_promote_oldest(process: Process) -> None:
    processes.promote(process, at(1))


def act_claim_from_a_beating_owner(process: Process) -> None:
    """The process of the owner seems to be gone, but its heartbeat moves."""

    def beat() -> None:
        owner = tell_run(process.store.inner, PREFIX).owner
        if owner is not None:
            processes.beat(beside(process), owner, next(beats))

    beats = count(1)
    believer = replace(process, clock=EventfulClock(during_sleep=beat), mistaken=lambda: True)
    try:
        processes.claim(believer, believer.log())
    except LiveOwner:
        process.ledger.acknowledge("left alone")
    else:
        raise Violation("a heartbeat outvotes a missing pid: its attempt was ended")


def act_resume(process: Process) -> None:
    processes.train(process, commits=1)


def act_read_back(process: Process) -> None:
    """Find the run and its newest checkpoint by name and load it, as the reading verbs and `cairn sample` do."""
    store = as_store(process.store)
    if RUN not in list_run_ids(store):
        raise AssertionError("the run is not listed")
    log = process.log()
    reference = resume_point.newest_verified(log, writer=process.writer(), sleep=process.clock.sleep)
    processes.load(process, reference)
    process.ledger.acknowledge(f"read {reference}")


def refused(act: Act) -> Act:
    """Return an act that is not let in, because a newer program has written."""

    def act_in_vain(process: Process) -> None:
        with suppress(WriterTooOld):
            act(process)

    return act_in_vain


def claim(process: Process) -> None:
    processes.claim(process, process.log())


IN_VAIN = Outcome(result=b"", problem="exited with 1")
evaluate_second = partial(processes.evaluate, prefix=at(2), during=None)
SCENARIOS = (
    Scenario("open-run", nothing, processes.open_run),
    Scenario("claim-first", opened, claim),
    Scenario("claim-and-take-over", owned, claim),
    Scenario("claim-from-a-beating-owner", owned, act_claim_from_a_beating_owner),
    Scenario("stage", owned, partial(processes.stage, step=3, attempt=1)),
    Scenario("commit", staged, act_commit),
    Scenario("stage-and-commit", owned, act_stage_and_commit),
    Scenario("evaluate", owned, partial(evaluate_second, measure=measured(0.5))),
    Scenario("evaluate-beside-another", ended, act_evaluate_beside_another),
    Scenario("evaluate-in-vain", ended, partial(evaluate_second, measure=lambda order, timeout: IN_VAIN)),
    Scenario("promote", promoted_oldest, partial(processes.promote, prefix=at(2))),
    Scenario("promote-oldest", evaluated, act_promote_oldest),
    Scenario("promote-refused", promoted, act_promote_oldest),
    Scenario("roll-back", promoted, processes.go_back),
    Scenario("quarantine-and-resume", second_is_broken, act_resume),
    Scenario("resume", ended, act_resume),
    Scenario("restore-and-resume", second_is_condemned, act_resume),
    Scenario("sweep-of-quarantined", condemned_and_aged, processes.sweep),
    Scenario("commit-after-a-newer-program", taken_over_by_a_newer_program, refused(act_commit)),
    Scenario("sweep-after-a-newer-program", taken_over_by_a_newer_program, refused(processes.sweep)),
    Scenario("supersede-and-delete", evaluated, processes.sweep),
    Scenario("sweep", aged, processes.sweep),
    Scenario("delete", torn_and_ended, processes.delete),
    Scenario("delete-what-an-alias-left", left_by_its_alias, processes.delete),
    Scenario("note-beside-an-owner", staged, processes.note),
    Scenario("read-back", ended, act_read_back),
    Scenario("read-back-over-a-foreign-cache", poisoned_cache, act_read_back),
    Scenario("end-attempt", owned, lambda process: processes.end_attempt(process, process.log(), 1)),
    Scenario("finish-run", owned, lambda process: processes.finish_run(process, process.log(), 1)),
)


@cache
def world_before(scenario: Scenario) -> Snapshot:
    """Return the world in which the scenario begins."""
    process = Process(store=WatchedStore(MemoryStore("before")), ledger=Ledger())
    scenario.before(process)
    return take_snapshot(process.store, process.ledger)
