"""What happens to runs in a store in memory, for state machines: sweeps, deaths, damage, deletions."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from cairn.storage.checkpoints.resume_point import quarantine_checkpoint
from cairn.storage.checkpoints.sweep import SweepReport
from cairn.storage.logs.run_entries import CheckpointCommitted, ReadEvidence, RunDeleted
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.attempt.attempt_entries import Claimant
from cairn.tasks.checkpoints.retention import delete_run, sweep_run
from cairn.tasks.configuration.settings import BudgetsConfig, CheckpointConfig, LeaseConfig
from tests.entries import writer
from tests.full_amount import FULL
from tests.memory_store import MemoryStore
from tests.storage.builders import copy_objects, flip_bit, no_sleep
from tests.storage.faulty_store import Fault, die_at_a_deed
from tests.storage.inline_executor import InlineExecutor

SUITE = "s"
PLACES = st.integers(0, 9)
DEATHS = st.sampled_from([Fault.DEATH_AFTER, Fault.LATE])
"""A late request may arrive later, or never, as that of a process that died before it."""


def swept(run_id: str, policy: CheckpointConfig, store: Any) -> SweepReport:
    return sweep_run(RunLog(store, run_id), policy, SUITE)


def spoil(log: RunLog, committed: CheckpointCommitted, *, is_damaged: bool) -> None:
    """Quarantine a checkpoint that is damaged, or that one host could not read by its own fault."""
    key = f"{committed.prefix}/trainer.json"
    if is_damaged:
        flip_bit(log.store, key)
    evidence = ReadEvidence(key=key, expected="1", found=f"sha256 is {log.seq}", reads=3, host="sick")
    quarantine_checkpoint(log, committed, "flipped", evidence=(evidence,), writer=writer())


def delete(log: RunLog) -> None:
    """Delete the run as the command does, on a clock that ticks when it is read; raises `GateRefused`."""
    lease = LeaseConfig(seconds=1.0, heartbeat_seconds=0.25)
    ticks, budgets = count().__next__, BudgetsConfig()
    claimant = Claimant(lease=lease, budgets=budgets, writer=writer(), monotonic=ticks, sleep=no_sleep)
    delete_run(log, RunDeleted(by="me", why=""), claimant)


def act_and_die(
    act: Callable[[Any], object], store: Any, undisturbed: MemoryStore, fault: Fault, deed: int
) -> list[Callable[[], object]]:
    """Die at a deed of an act, which is done to its end on a copy; returns the request that is still on its way."""
    copy_objects(store.inner, undisturbed)
    dead = die_at_a_deed(act, store, undisturbed, fault, deed)
    return [dead.late] if dead.late else []


def run_machine(machine: type[RuleBasedStateMachine], *, examples: int, steps: int) -> None:
    """Run a state machine without threads, five times as often and twice as long where everything is tried."""
    more, longer = (5, 2) if FULL else (1, 1)
    amount = settings(
        max_examples=more * examples,
        stateful_step_count=longer * steps,
        phases=[Phase.generate],  # to shrink a failure takes minutes
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.storage.stores.object_store.ThreadPoolExecutor", InlineExecutor)
        run_state_machine_as_test(machine, settings=amount)
