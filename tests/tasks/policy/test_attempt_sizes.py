"""Where a segment ends, by steps and by the clock, and what a run changes after out-of-memory.

These are the first lighter sizes that are estimated to fit, and the processes that can share them.
"""

from typing import Any

import pytest

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.estimates.size_estimate import TrainingPlace, estimate_memory
from cairn.storage.logs.run_log import fold
from cairn.tasks.configuration.settings import CheckpointConfig
from cairn.tasks.errors import TaskError
from cairn.tasks.policy.attempt_sizes import (
    MARGIN,
    AttemptSizes,
    MemoryRoom,
    choose_lighter,
    lighter_sizes,
    next_sizes,
    segment_end,
    stall_seconds,
)
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


NETWORK = ModelConfig(n_layer=6, n_head=6, n_embd=384, block_size=256)
TRAINING = TrainingConfig(steps=1, global_batch=32, precision="fp32", kernels="stock", probe_every_steps=0)


def sizes(windows: int, recompute: bool = False) -> AttemptSizes:
    return AttemptSizes(micro_batch=windows, activation_checkpointing=recompute)


def needed(windows: int, recompute: bool = False) -> int:
    place = TrainingPlace()
    return estimate_memory(NETWORK, TRAINING, 8192, micro_batch=windows, recompute=recompute, place=place).total_bytes


def room(size: int) -> MemoryRoom:
    return MemoryRoom(bytes=size, estimate=lambda wanted: needed(wanted.micro_batch, wanted.activation_checkpointing))


def with_margin(windows: int, recompute: bool = False) -> int:
    return int(needed(windows, recompute) / (1 - MARGIN)) + 2


def chosen(now: AttemptSizes, there: MemoryRoom | None, **order: Any) -> AttemptSizes | None:
    return choose_lighter(now, lighter_sizes(now, global_batch=32, **order), there)


def test_recomputed_activations_come_first_then_smaller_micro_batches() -> None:
    assert lighter_sizes(sizes(8), global_batch=32) == [sizes(windows, True) for windows in (8, 4, 2, 1)]
    assert lighter_sizes(sizes(8, True), global_batch=32) == [sizes(windows, True) for windows in (4, 2, 1)]


def test_where_speed_is_preferred_activations_are_recomputed_last() -> None:
    found = lighter_sizes(sizes(4), global_batch=32, halves_first=True)
    assert found == [sizes(2), sizes(1), sizes(4, True), sizes(2, True), sizes(1, True)]


def test_a_smaller_micro_batch_is_one_that_the_processes_can_share() -> None:
    assert lighter_sizes(sizes(6, True), global_batch=12, processes=2) == [sizes(3, True)]


def test_bits_are_kept_while_recomputing_just_fits() -> None:
    assert chosen(sizes(16), room(needed(16, True))) == sizes(16, True)


@pytest.mark.parametrize("windows", [8, 4])
def test_what_cannot_fit_is_passed_over_and_the_first_that_fits_with_a_margin_is_taken(windows: int) -> None:
    assert chosen(sizes(16), room(with_margin(windows, True))) == sizes(windows, True)


def test_where_speed_is_preferred_the_first_that_fits_is_taken_in_that_order() -> None:
    assert chosen(sizes(16), room(with_margin(4)), halves_first=True) == sizes(4)


def test_where_nothing_fits_the_lightest_is_tried_once() -> None:
    assert chosen(sizes(16), room(1)) == sizes(1, True)
    assert chosen(sizes(1, True), room(1)) is None


def test_where_nothing_is_known_the_next_on_the_ladder_is_taken() -> None:
    assert [chosen(now, None) for now in (sizes(8), sizes(8, True), sizes(1, True))] == [
        sizes(8, True),
        sizes(4, True),
        None,
    ]
