"""Whatever happens to a run, and wherever its sweeps die, no sweep takes what is needed or leaves what is not.

Beside the invariants here, `WatchedStore` proves each deletion, at its moment, by the raw entries alone.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cairn.storage.checkpoints.checkpoint import verify_checkpoint
from cairn.storage.checkpoints.resume_point import new_pin, pin_checkpoint, unpin_checkpoint
from cairn.storage.logs.registry import Registry
from cairn.storage.logs.run_entries import CheckpointCommitted, CheckpointPinned, StagedCheckpoint
from cairn.storage.logs.run_log import fold
from cairn.tasks.checkpoints.promotion import Candidate, PromotionRules, offer
from cairn.tasks.configuration.settings import CheckpointConfig
from cairn.tasks.errors import GateRefused
from tests.entries import evaluated, gone_placement, placement, writer
from tests.fabricated_run import FabricatedRun
from tests.memory_store import MemoryStore
from tests.protocol.world import WatchedStore, as_store
from tests.storage.builders import RUN, check_invariants, commit, copy_objects, laid_out, run_log, stage
from tests.storage.faulty_store import Fault
from tests.storage.run_events import DEATHS, PLACES, SUITE, act_and_die, delete, run_machine, spoil, swept

CHECKPOINTS = f"runs/{RUN}/checkpoints"
KEEPS = {"keep_last": st.integers(1, 2), "keep_best": st.integers(0, 1), "keep_every": st.sampled_from([0, 2])}
POLICIES = st.builds(CheckpointConfig, **KEEPS)
PURPOSES = st.sampled_from([{"suite_sha256": SUITE}, {"alias": "next"}, {"fork": "twin"}])
has_commits = precondition(lambda self: bool(self.log.state.readable))
is_trained = precondition(lambda self: self.log.state.open_attempt is not None)
is_there = precondition(lambda self: self.log.state.deleted is None)
is_old = precondition(lambda self: self.log.seq > 20 and self.log.state.deleted is None)


def settled(policy: CheckpointConfig, store: MemoryStore) -> object:
    """Sweep until nothing changes: what a sweep takes back, the next one may give up. Return what is left."""
    log, seq = run_log(store), None
    while log.seq != seq:
        seq = log.seq
        swept(RUN, policy, store)
        log.refresh()
    kept = [(record.committed.prefix, record.state) for record in log.state.checkpoints]
    return kept, store.keys(CHECKPOINTS), {pin.pin_id for pin in log.state.pins}


class SweptRun(RuleBasedStateMachine):
    """A run in memory whose trainers, evaluators, offerers, forkers and sweepers act in any order, and die."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MemoryStore("test")
        self.store = as_store(WatchedStore(self.inner))
        self.log = laid_out(self.store, 1, 2, 3)
        self.run = FabricatedRun(log=self.log)
        self.newest: str | None = None
        self.quarantined = set[str]()
        self.staged: StagedCheckpoint | None = None
        self.pins, self.late = list[CheckpointPinned](), list[Callable[[], object]]()
        self.pin(place=2, is_dead=False, purpose={"suite_sha256": SUITE})

    def pick(self, place: int) -> CheckpointCommitted:
        readable = self.log.state.readable
        return readable[place % len(readable)].committed

    @is_trained
    @rule()
    def end_attempt(self) -> None:
        self.run.end("lost", action="resume")
        self.staged = None

    @is_there
    @rule(is_new=st.booleans(), commits=st.integers(0, 2), dies_before_a_commit=st.booleans())
    def train(self, is_new: bool, commits: int, dies_before_a_commit: bool) -> None:
        if is_new and self.log.state.open_attempt is not None:
            self.end_attempt()
        if self.log.state.open_attempt is None:
            self.run.start()
        for _ in range(commits):
            self.newest, self.staged = commit(self.log, self.stage()).readable[0].committed.prefix, None
        if dies_before_a_commit:
            self.staged = self.stage()

    def stage(self) -> StagedCheckpoint:
        owner = self.log.state.attempts[-1]
        return stage(self.store, step=owner.last_known_step + 1, attempt=owner.started.attempt)

    @has_commits
    @rule(place=PLACES, is_damaged=st.booleans())
    def quarantine(self, place: int, is_damaged: bool) -> None:
        committed = self.pick(place)
        if committed.prefix in self.quarantined:  # the judge takes two equal entries for one that was sent twice
            return
        self.quarantined.add(committed.prefix)
        spoil(self.log, committed, is_damaged=is_damaged)
        self.newest = None if committed.prefix == self.newest else self.newest

    @has_commits
    @rule(place=PLACES, is_dead=st.booleans(), purpose=PURPOSES)
    def pin(self, place: int, is_dead: bool, purpose: dict[str, str]) -> None:
        pin = new_pin(self.pick(place).reference, gone_placement() if is_dead else placement(), **purpose)
        assert pin_checkpoint(self.log, pin, writer=writer())
        self.pins += [] if is_dead else [pin]

    @precondition(lambda self: bool(self.pins))
    @rule(place=PLACES)
    def unpin(self, place: int) -> None:
        unpin_checkpoint(self.log, self.pins.pop(place % len(self.pins)), "it is done", writer=writer())

    @has_commits
    @rule(place=PLACES, loss=st.integers(1, 9), is_offered=st.booleans())
    def evaluate(self, place: int, loss: int, is_offered: bool) -> None:
        reference = self.pick(place).reference
        self.run.evaluate(reference, loss=loss, suite_sha256=SUITE)
        if is_offered:
            measured = evaluated(reference.step, loss, manifest_sha256=reference.manifest_sha256)
            candidate = Candidate(run_id=RUN, reference=reference, evaluations=(measured,), by="me")
            with suppress(GateRefused):
                offer(self.log, Registry(self.store, "champion"), candidate, PromotionRules())

    @rule(policy=POLICIES)
    def sweep(self, policy: CheckpointConfig) -> None:
        before = self.log.state.readable
        swept(RUN, policy, self.store)
        after = self.log.refresh().readable
        known = sorted({(item.number, item.committed.step) for item in (*before, *after)}, reverse=True)
        every = policy.keep_every or 1_000
        due = {number for place, (number, step) in enumerate(known) if place < policy.keep_last or step % every == 0}
        assert due <= {item.number for item in after}, "the policy keeps these"
        left = {item.committed.prefix for item in self.log.state.live_checkpoints if item.is_kept}
        assert set(self.store.folders(CHECKPOINTS)) == left | ({self.staged.prefix} if self.staged else set())

    @rule(policy=POLICIES, fault=DEATHS, deed=PLACES)
    def die_in_a_sweep(self, policy: CheckpointConfig, fault: Fault, deed: int) -> None:
        undisturbed, again = MemoryStore("undisturbed"), MemoryStore("again")
        self.late += act_and_die(partial(swept, RUN, policy), self.store, undisturbed, fault, deed)
        copy_objects(self.inner, again)
        assert settled(policy, again) == settled(policy, undisturbed)

    @precondition(lambda self: bool(self.late))
    @rule()
    def receive_a_late_request(self) -> None:
        self.late.pop()()

    @is_old
    @rule()
    def delete_run(self) -> None:
        with suppress(GateRefused):
            delete(self.log)
            assert self.store.keys(CHECKPOINTS) == []
            self.newest, self.pins, self.staged = None, [], None

    def teardown(self) -> None:
        assert self.log.refresh() == fold(self.log.read_entries()) == check_invariants(self.store, set())

    @invariant()
    def what_is_readable_is_whole(self) -> None:
        readable = (record.committed.reference for record in self.log.refresh().readable)
        assert not any(verify_checkpoint(self.store, reference, sizes_only=True) for reference in readable)

    @invariant()
    def a_start_resumes_from_the_newest_commit_unless_it_is_quarantined(self) -> None:
        reference = self.log.refresh().resume_reference
        assert self.newest is None or (reference is not None and reference.prefix == self.newest)

    @invariant()
    def what_the_living_pinned_and_what_is_champion_is_kept(self) -> None:
        champion = Registry(self.store, "champion").refresh().champion
        needed = {pin.prefix for pin in self.pins} | ({champion.prefix} if champion else set())
        assert needed <= {record.committed.prefix for record in self.log.refresh().live_checkpoints if record.is_kept}

    @invariant()
    def what_the_open_attempt_has_staged_is_there(self) -> None:
        assert self.staged is None or f"{self.staged.prefix}/manifest.json" in self.store.keys(self.staged.prefix)


def test_no_order_of_events_makes_a_sweep_take_what_is_needed_or_leave_what_is_not() -> None:
    run_machine(SweptRun, examples=50, steps=10)
