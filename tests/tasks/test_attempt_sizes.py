"""Where a segment ends, by steps and by the clock, and which processes can share what out-of-memory left."""

import pytest

from cairn.model.configuration.training import TrainingConfig
from cairn.storage.logs.run_log import fold
from cairn.tasks.configuration.settings import CheckpointConfig
from cairn.tasks.errors import TaskError
from cairn.tasks.policy.attempt_sizes import next_sizes, segment_end, stall_seconds
from tests.entries import decided, ended, started
from tests.storage.builders import entry, opened


def ends(checkpoint: CheckpointConfig, *, first: int = 0, total_steps: int = 25, step_seconds: float) -> list[int]:
    """Return every border of a run whose first step is not timed before it is trained."""
    found, timed = [first], None
    while found[-1] < total_steps:
        found.append(segment_end(found[-1], checkpoint, total_steps=total_steps, step_seconds=timed))
        timed = step_seconds
    return found[1:]


@pytest.mark.parametrize(
    ("every_seconds", "first", "step_seconds", "expected"),
    [
        pytest.param(None, 0, 9.0, [10, 20, 25], id="without seconds at multiples and at the end"),
        pytest.param(None, 13, 9.0, [20, 25], id="resumed between multiples at the next one"),
        pytest.param(12.0, 0, 3.0, [1, 5, 9, 10, 14, 18, 20, 24, 25], id="with seconds none takes longer than they"),
        pytest.param(12.0, 0, 0.7, [1, 10, 20, 25], id="with seconds no multiple is passed over"),
    ],
)
def test_segments_end_at_multiples_and_after_their_seconds(
    every_seconds: float | None, first: int, step_seconds: float, expected: list[int]
) -> None:
    checkpoint = CheckpointConfig(every_steps=10, every_seconds=every_seconds)
    assert ends(checkpoint, first=first, step_seconds=step_seconds) == expected


def test_a_step_longer_than_the_seconds_is_a_segment() -> None:
    assert segment_end(3, CheckpointConfig(every_seconds=1.0), total_steps=9, step_seconds=60.0) == 4


@pytest.mark.parametrize(
    ("step", "keep_every", "decides", "expected"),
    [(10, 0, False, 7.0), (25, 0, False, None), (10, 5, False, None), (10, 4, False, 7.0), (10, 0, True, None)],
)
def test_no_commit_is_left_out_at_the_end_at_milestones_and_where_an_evaluation_decides(
    step: int, keep_every: int, decides: bool, expected: float | None
) -> None:
    checkpoint = CheckpointConfig(stall_seconds=7.0, keep_every=keep_every)
    assert stall_seconds(step, checkpoint, total_steps=25, decides=decides) == expected


def test_seconds_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="every_seconds"):
        CheckpointConfig(every_seconds=0.0)


def test_after_a_halved_micro_batch_other_processes_can_share_the_batch_and_are_named() -> None:
    halved = ended(1, "oom", decision=decided(micro_batch=2))
    state = fold([entry(opened()), entry(started(1, micro_batch=4)), entry(halved)])
    training = TrainingConfig(steps=4, global_batch=12, micro_batch=4)
    assert next_sizes(state, training, 8, processes=6).micro_batch == 2
    with pytest.raises(TaskError, match=r"4 processes cannot share 6 micro-batches .*processes that can: 1, 3, 6\."):
        next_sizes(state, training, 8, processes=4)
