"""The campaign on Slurm: its plans are functions of seeds, its idle times leave out what Slurm itself takes."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from cairn.storage.logs.fold_cache import History
from cairn.storage.logs.run_state import AttemptRecord, RunState
from cairn.storage.logs.step_log import StepRecord, step_log_key
from tests.crash import slurm_job
from tests.entries import NOON, started
from tests.memory_store import MemoryStore
from tests.programs.chaos.slurm_campaign import REASONS, plan_run
from tests.programs.chaos.slurm_times import Idle, JobStates, idle_times

BEGIN = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


@pytest.fixture
def states() -> JobStates:
    """Running for 100 seconds, 30 in the queue, and running again until the end."""
    states = JobStates(lambda: "RUNNING")
    states.stop()
    states.spans = [(BEGIN, "RUNNING"), (BEGIN + 100, "PENDING"), (BEGIN + 130, "RUNNING"), (BEGIN + 200, "COMPLETED")]
    return states


def record(attempt: int, step: int, second: float) -> bytes:
    at = datetime.fromtimestamp(BEGIN, tz=UTC) + timedelta(seconds=second)
    zero = dict.fromkeys(("train_loss", "lr", "grad_norm", "tokens_per_second", "mfu", "seconds"), 0.0)
    return msgspec.json.encode(
        StepRecord(step=step, attempt=attempt, memory_bytes=0, probe_loss=None, sample=None, at=at, **zero)  # type: ignore[arg-type]
    )


def test_a_seed_means_the_same_disturbances_everywhere() -> None:
    assert [plan_run(seed) for seed in range(9)] == [plan_run(seed) for seed in range(9)]
    drawn = {disturbance.name for seed in range(200) for disturbance in plan_run(seed)}
    assert drawn == set(REASONS)


def test_everything_that_may_be_drawn_can_be_done() -> None:
    assert [name for name in REASONS if name != "cancel" and not callable(getattr(slurm_job, name, None))] == []


def test_the_time_between_two_attempts_is_idle_as_far_as_the_job_was_running(states: JobStates) -> None:
    store = MemoryStore()
    for attempt, seconds in ((1, (40, 90)), (2, (155, 160))):
        lines = b"\n".join(record(attempt, step, second) for step, second in enumerate(seconds, 1))
        store.create(step_log_key("runs/bard", attempt), lines + b"\n")
    attempts = [AttemptRecord(started=started(attempt), started_at=NOON) for attempt in (1, 2)]
    state = RunState(attempts=History(attempts))
    (idle,) = idle_times(store, "bard", state, states)
    assert idle == Idle(where="between attempts 1 and 2", seconds=35.0, start_seconds=40.0)
    assert (idle.allowed, idle.is_too_long) == (70.0, False)


def test_a_job_has_left_when_it_is_first_seen_not_to_run(states: JobStates) -> None:
    assert states.left_running(BEGIN + 150) == BEGIN + 200
