"""A fork's beginning stays with its parent: pinned before the fork is opened, until the fork can do without it.

Late requests of dead processes from every state: scenarios `fork` of `tests/protocol`.
"""

from collections.abc import Callable
from typing import Any

import pytest

from cairn.storage.checkpoints.resume_point import (
    new_pin,
    newest_verified,
    open_fork,
    pin_checkpoint,
    quarantine_checkpoint,
)
from cairn.storage.errors import IntegrityError, NothingReadable
from cairn.storage.logs.log_entry import CheckpointReference, ForkOrigin, this_writer
from cairn.storage.logs.run_entries import AttemptStarted, CheckpointPinned, Placement, RunOpened
from cairn.storage.logs.run_index import RunIndex
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.tasks.attempt.attempt_entries import Claimant, claim_attempt
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.configuration.settings import BudgetsConfig, CheckpointConfig, LeaseConfig
from tests import entries
from tests.entries import ended, gone_placement, placement, started, writer
from tests.fabricated_run import FabricatedRun
from tests.storage.builders import RUN, ended_run, flip_bit, no_sleep
from tests.storage.faulty_store import Death

FORK = "twin"
KEEPS_TWO = {"checkpoint": {"keep_last": 2}}


@pytest.fixture
def parent() -> RunLog:
    """A run with two commits whose attempt has ended."""
    return ended_run(10, 20)


def body_of(parent: RunLog, *, step: int = 10, **changes: Any) -> RunOpened:
    record = next(item.committed for item in parent.state.checkpoints if item.committed.step == step)
    origin = ForkOrigin(run_id=RUN, checkpoint=record.reference, state_sha256=record.state_sha256, config=KEEPS_TWO)
    return entries.opened(FORK, forked_from=origin, **changes)


def pin_of(body: RunOpened, maker: Placement | None = None) -> CheckpointPinned:
    assert body.forked_from is not None
    return new_pin(body.forked_from.checkpoint, maker or gone_placement(), fork=FORK)


def fork(parent: RunLog, **changes: Any) -> FabricatedRun:
    """Fork the run by a process that is gone by now."""
    body = body_of(parent, **changes)
    open_fork(parent, body, pin_of(body), writer=this_writer())
    return FabricatedRun(log=RunLog(parent.store, FORK))


def kept_steps(parent: RunLog, keep_last: int = 1) -> list[int]:
    sweep_run(parent, CheckpointConfig(keep_last=keep_last, keep_best=0), "s" * 64)
    return [record.committed.step for record in parent.refresh().live_checkpoints]


def fork_state(parent: RunLog) -> RunState:
    return RunLog(parent.store, FORK).refresh()


def die_before_opening(parent: RunLog) -> Callable[[], object]:
    """Fork and die; returns the request that opens the fork, which is still under way."""
    sent: list[Callable[[], object]] = []
    create = parent.store.create

    def create_or_die(key: str, data: bytes) -> bool:
        if not key.startswith(f"runs/{FORK}/"):
            return create(key, data)
        sent.append(lambda: create(key, data))
        raise Death

    body = body_of(parent)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Death):
        patch.setattr(parent.store, "create", create_or_die)
        open_fork(parent, body, pin_of(body), writer=this_writer())
    return sent[0]


def test_a_late_birth_after_a_sweep_opens_nothing(parent: RunLog) -> None:
    late = die_before_opening(parent)
    assert kept_steps(parent) == [20]
    late()
    assert fork_state(parent).opened is None


def test_a_late_birth_before_a_sweep_keeps_its_beginning(parent: RunLog) -> None:
    die_before_opening(parent)()
    assert kept_steps(parent) == [10, 20]


def test_a_dry_run_closes_nothing_and_says_what_a_sweep_would_do(parent: RunLog) -> None:
    die_before_opening(parent)
    report = sweep_run(parent, CheckpointConfig(keep_last=1, keep_best=0), "s" * 64, dry_run=True)
    assert RunLog(parent.store, FORK).refresh() == RunState()
    assert [item.action for item in report.items if item.kind == "pin"] == ["unpin"]


def test_a_name_that_was_given_up_can_be_forked_again(parent: RunLog) -> None:
    late = die_before_opening(parent)
    kept_steps(parent)
    fork(parent, step=20)
    late()
    assert fork_state(parent).resume_step == 20 and kept_steps(parent) == [20]


def test_a_process_that_was_wrongly_taken_for_dead_opens_nothing_and_its_pin_ends(parent: RunLog) -> None:
    body, sweeper = body_of(parent), RunLog(parent.store, RUN)
    create = parent.store.create

    def swept_before(key: str, data: bytes) -> bool:
        if key == f"runs/{FORK}/log/9999999999.json" and b"run-opened" in data:
            kept_steps(sweeper)
        return create(key, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parent.store, "create", swept_before)
        state = open_fork(parent, body, pin_of(body), writer=this_writer())
    assert state.opened is None and not parent.refresh().pins


def test_a_name_that_was_given_up_is_not_listed_as_a_run(parent: RunLog) -> None:
    die_before_opening(parent)
    kept_steps(parent)
    assert [run for run, _ in RunIndex(parent.store).read_all(lambda log: log, lambda run, why: why)] == [RUN]


def test_a_fork_is_not_opened_unless_its_beginning_is_pinned(parent: RunLog) -> None:
    body = body_of(parent)
    kept_steps(parent)
    with pytest.raises(IntegrityError, match="was given up meanwhile"):
        open_fork(parent, body, pin_of(body), writer=this_writer())
    assert fork_state(parent).opened is None


def test_who_loses_the_race_for_a_fork_leaves_no_pin(parent: RunLog) -> None:
    fork(parent)
    body = body_of(parent, step=20)
    open_fork(parent, body, pin_of(body, placement(host="elsewhere")), writer=this_writer())
    assert [pin.step for pin in parent.refresh().pins] == [10]


def test_a_pin_of_a_fork_that_began_elsewhere_is_over_whoever_made_it(parent: RunLog) -> None:
    fork(parent, step=20)
    pin_checkpoint(parent, pin_of(body_of(parent), placement(host="elsewhere")), writer=this_writer())
    assert kept_steps(parent) == [20]


def test_a_pin_outlives_the_process_that_forked(parent: RunLog) -> None:
    fork(parent)
    assert kept_steps(parent) == [10, 20]


def test_a_claim_alone_does_not_end_the_pin(parent: RunLog) -> None:
    fork(parent).start()
    assert kept_steps(parent) == [10, 20]


def grow(parent: RunLog, *steps: int) -> FabricatedRun:
    """Fork the run, and let attempt 1 of the fork, which keeps two checkpoints, commit at these steps and end."""
    child = fork(parent)
    child.start(overrides=("checkpoint.keep_last=2",))
    for step in steps:
        child.commit(step)
    child.log.append(lambda state: ended(1), writer=writer())
    return child


def break_commits(child: FabricatedRun) -> None:
    for record in child.log.state.readable:
        flip_bit(child.log.store, f"{record.committed.prefix}/manifest.json")


def claim_again(log: RunLog) -> CheckpointReference | None:
    """Claim the run with `--start-over`; returns what the attempt resumes from."""
    rules = {"lease": LeaseConfig(seconds=1.0, heartbeat_seconds=0.25), "budgets": BudgetsConfig()}
    claimant = Claimant(**rules, writer=writer(), sleep=no_sleep, start_over=True)  # type: ignore[arg-type]

    def start(number: int, reference: CheckpointReference | None, state: RunState) -> AttemptStarted:
        return started(number, resumed_from=reference)

    return claim_attempt(log, claimant, start).resumed_from


GROWTH = {(): [10, 20], (12,): [10, 20], (12, 14): [20], (12, 14, 16): [20]}


@pytest.mark.parametrize("steps", GROWTH, ids=str)
def test_the_beginning_stays_until_the_fork_has_as_many_commits_as_it_keeps(
    parent: RunLog, steps: tuple[int, ...]
) -> None:
    grow(parent, *steps)
    assert kept_steps(parent) == GROWTH[steps]


def test_a_commit_that_cannot_be_read_does_not_count(parent: RunLog) -> None:
    child = grow(parent, 12, 14)
    quarantine_checkpoint(child.log, child.log.state.readable[0].committed, "unreadable", writer=writer())
    assert kept_steps(parent) == [10, 20]


def test_a_finished_fork_needs_its_beginning_no_more(parent: RunLog) -> None:
    child = fork(parent)
    child.start(overrides=("checkpoint.keep_last=2",))
    child.finish(child.commit(12))
    assert kept_steps(parent) == [20]


def test_a_fork_that_starts_over_begins_with_its_parents_checkpoint_and_pins_it_anew(parent: RunLog) -> None:
    child = grow(parent, 12, 14)
    kept_steps(parent, keep_last=2)
    assert not parent.state.pins
    break_commits(child)
    assert claim_again(child.log) == child.log.state.beginning
    assert kept_steps(parent) == [10, 20]


def test_a_fork_whose_beginning_is_deleted_does_not_claim_it(parent: RunLog) -> None:
    child = grow(parent, 12, 14)
    kept_steps(parent)
    break_commits(child)
    with pytest.raises(NothingReadable, match="nothing is left to start over from"):
        claim_again(child.log)
    assert child.log.refresh().latest_attempt == 1


def test_a_fork_whose_beginning_is_damaged_does_not_claim_it(parent: RunLog) -> None:
    child = grow(parent, 12, 14)
    break_commits(child)
    flip_bit(parent.store, f"{parent.state.checkpoints[0].committed.prefix}/manifest.json")
    with pytest.raises(NothingReadable, match=r"which cannot be read: .*; nothing is left to start over from"):
        claim_again(child.log)
    assert len(parent.refresh().pins) == 1, "that of the fork's maker"


def test_a_beginning_that_its_parent_gave_up_meanwhile_is_not_claimed(parent: RunLog) -> None:
    child = grow(parent, 12, 14)
    break_commits(child)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(NothingReadable, match="which has given it up"):
        patch.setattr(parent.store, "delete_all", lambda keys: None)
        kept_steps(parent)
        claim_again(child.log)


def pin_elsewhere(parent: RunLog) -> None:
    pin_checkpoint(parent, pin_of(body_of(parent), placement(host="elsewhere")), writer=this_writer())


def finish_fork(parent: RunLog) -> None:
    child = fork(parent)
    child.start()
    child.finish(child.commit(12))


PINS: dict[str, Callable[[RunLog], object]] = {
    "was never opened": die_before_opening,
    "may still be opened": pin_elsewhere,
    "was opened without it": lambda parent: (fork(parent, step=20), pin_elsewhere(parent)),
    "needs it no more": finish_fork,
    "has 1 of the 2 checkpoints of its own that it keeps": lambda parent: grow(parent, 12),
    "has 2 of the 2 checkpoints of its own that it keeps": lambda parent: grow(parent, 12, 14),
}


@pytest.mark.parametrize("why", PINS)
def test_a_sweep_says_of_each_pin_how_far_its_fork_is(parent: RunLog, why: str) -> None:
    PINS[why](parent)
    report = sweep_run(parent, CheckpointConfig(keep_last=1, keep_best=0), "s" * 64, dry_run=True)
    pins = [item.why for item in report.items if item.kind == "pin" and item.step == 10]
    assert pins == [f"run {FORK}, which was forked from it, {why}"]


def test_the_pin_of_a_fork_whose_log_cannot_be_read_stays(parent: RunLog) -> None:
    child = grow(parent, 12, 14)
    flip_bit(parent.store, parent.store.first(f"{child.log.prefix}/log") or "")
    assert kept_steps(parent) == [10, 20]


def advice(child: FabricatedRun) -> str:
    with pytest.raises(NothingReadable) as caught:
        newest_verified(child.log, writer=writer(), sleep=no_sleep, quarantines_at_most=2)
    return str(caught.value)


def test_starting_over_is_advised_at_the_step_where_the_fork_begins(parent: RunLog) -> None:
    break_commits(child := grow(parent, 12, 14))
    assert advice(child).endswith("or start over at step 10 with `cairn train --start-over`")


def test_starting_over_is_not_advised_where_nothing_is_left(parent: RunLog) -> None:
    break_commits(child := grow(parent, 12, 14))
    kept_steps(parent)
    said = advice(child)
    assert "--start-over" not in said and said.endswith("or fork another step")
