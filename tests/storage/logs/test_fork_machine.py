"""A fork has its beginning for as long as it needs it, whatever happens to its family, and wherever a forker dies.

Beside the invariants here, `WatchedStore` proves each deletion, at its moment, by the raw entries alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cairn.storage.checkpoints.checkpoint import verify_checkpoint
from cairn.storage.checkpoints.resume_point import begin_again, new_pin, newest_verified, open_fork
from cairn.storage.errors import NothingReadable
from cairn.storage.logs.log_entry import CheckpointReference, ForkOrigin
from cairn.storage.logs.run_entries import CheckpointPinned, RunOpened
from cairn.storage.logs.run_log import RunLog, fold
from cairn.tasks.configuration.settings import CheckpointConfig
from cairn.tasks.errors import GateRefused
from tests.entries import gone_placement, opened, started, writer
from tests.fabricated_run import FabricatedRun
from tests.log_judge import judge_store
from tests.memory_store import MemoryStore
from tests.protocol.raw_history import tell_run
from tests.protocol.world import WatchedStore, as_store
from tests.storage.builders import RUN, laid_out, no_sleep
from tests.storage.faulty_store import Fault
from tests.storage.run_events import DEATHS, PLACES, act_and_die, delete, run_machine, spoil, swept

FORKS = ("child", "cousin", "grandchild")
KEEPS_TWO = {"data": {"sources": ["a.txt"]}, "training": {"steps": 100}, "checkpoint": {"keep_last": 2}}
POLICIES = st.builds(CheckpointConfig, keep_last=st.integers(1, 2), keep_best=st.just(0))


def opened_fork(parent: str, body: RunOpened, pin: CheckpointPinned, store: Any) -> object:
    return open_fork(RunLog(store, parent), body, pin, writer=writer())


class Family(RuleBasedStateMachine):
    """A run, its forks and theirs, which are trained, swept, deleted and forked again by processes that may die."""

    def __init__(self) -> None:
        super().__init__()
        self.store = as_store(WatchedStore(MemoryStore("test")))
        laid_out(self.store, 1, 2, 3)
        self.logs = {name: RunLog(self.store, name) for name in (RUN, *FORKS)}
        self.late = list[Callable[[], object]]()
        self.logs[RUN].refresh()
        self.fork(parent=0, place=2, death=None, deed=0)

    def pick(self, place: int) -> RunLog:
        """Return one of the runs that are open and not deleted, or the first run."""
        logs = [log for log in self.logs.values() if log.state.opened and not log.state.deleted]
        return logs[place % len(logs)] if logs else self.logs[RUN]

    def needs_beginning(self, log: RunLog) -> bool:
        return tell_run(self.store, log.prefix).needed_beginning is not None

    @rule(parent=PLACES, place=PLACES, death=st.none() | DEATHS, deed=PLACES)
    def fork(self, parent: int, place: int, death: Fault | None, deed: int) -> None:
        log, unopened = self.pick(parent), [name for name in FORKS if self.logs[name].state.opened is None]
        readable = log.state.readable
        if not readable or not unopened:
            return
        committed, (name, *_) = readable[place % len(readable)].committed, unopened
        reference, state_sha256 = committed.reference, committed.state_sha256
        origin = ForkOrigin(run_id=log.run_id, checkpoint=reference, state_sha256=state_sha256, config=KEEPS_TWO)
        pin = new_pin(reference, gone_placement(), fork=name)
        act = partial(opened_fork, log.run_id, opened(name, forked_from=origin), pin)
        if death is None:
            act(self.store)
        else:
            self.late += act_and_die(act, self.store, MemoryStore("copy"), death, deed)

    @precondition(lambda self: bool(self.late))
    @rule()
    def receive_a_late_request(self) -> None:
        self.late.pop()()

    @rule(run=PLACES, is_new=st.booleans(), commits=st.booleans())
    def train(self, run: int, is_new: bool, commits: bool) -> None:
        log = self.pick(run)
        if is_new and log.state.open_attempt is not None:
            FabricatedRun(log=log).end("lost", action="resume")
        if log.state.open_attempt is None and log.state.deleted is None:
            self.begin_attempt(log)
        if log.state.open_attempt is not None and commits:
            FabricatedRun(log=log).commit(log.state.open_attempt.last_known_step + 1)

    def begin_attempt(self, log: RunLog) -> None:
        """Resume as `--start-over` does; only a fork that has once grown may have nothing to begin with."""
        try:
            beginning = self.find_beginning(log)
        except NothingReadable:
            assert log.state.commits and not self.needs_beginning(log)
            return
        body = started(log.state.latest_attempt + 1, resumed_from=beginning, config=KEEPS_TWO)
        log.append(lambda state: body, writer=writer())

    def find_beginning(self, log: RunLog) -> CheckpointReference | None:
        try:
            return newest_verified(log, writer=writer(), sleep=no_sleep)
        except NothingReadable:
            return begin_again(log, gone_placement(), writer=writer(), sleep=no_sleep)

    @rule(run=PLACES)
    def lose_all_checkpoints(self, run: int) -> None:
        """Damage what no fork begins with: the only beginning of a fork is not to be lost."""
        log = self.pick(run)
        pinned = {pin.prefix for pin in log.state.pins}
        for record in log.state.readable:
            if record.committed.prefix not in pinned:
                spoil(log, record.committed, is_damaged=True)

    @rule(run=PLACES, policy=POLICIES)
    def sweep(self, run: int, policy: CheckpointConfig) -> None:
        log = self.pick(run)
        swept(log.run_id, policy, self.store)
        unopened = [name for name in FORKS if self.logs[name].refresh().opened is None]
        assert not [pin for pin in log.refresh().pins if pin.fork in unopened], "every forker is dead"

    @rule(run=PLACES, policy=POLICIES, fault=DEATHS, deed=PLACES)
    def die_in_a_sweep(self, run: int, policy: CheckpointConfig, fault: Fault, deed: int) -> None:
        act = partial(swept, self.pick(run).run_id, policy)
        self.late += act_and_die(act, self.store, MemoryStore("copy"), fault, deed)

    @precondition(lambda self: any(self.logs[name].state.opened for name in FORKS))
    @rule(run=PLACES)
    def delete(self, run: int) -> None:
        log = self.pick(run)
        try:
            delete(log)
        except GateRefused:
            assert any(pin.fork for pin in log.refresh().pins)

    def teardown(self) -> None:
        judge_store(self.store)
        for log in self.logs.values():
            assert log.refresh() == fold(log.read_entries())
            assert log.state.refused == ()

    @invariant()
    def what_is_readable_is_whole(self) -> None:
        for log in self.logs.values():
            readable = (record.committed.reference for record in log.refresh().readable)
            assert not any(verify_checkpoint(self.store, reference, sizes_only=True) for reference in readable)

    @invariant()
    def a_fork_has_the_beginning_that_it_needs_and_its_parent_keeps_it(self) -> None:
        for name in FORKS:
            origin = self.logs[name].refresh().origin
            if origin is not None and self.needs_beginning(self.logs[name]):
                assert verify_checkpoint(self.store, origin.checkpoint) == ()
                assert name in [pin.fork for pin in self.logs[origin.run_id].refresh().pins]


def test_no_order_of_events_takes_a_beginning_from_a_fork_that_needs_it() -> None:
    run_machine(Family, examples=45, steps=15)
