"""What a run changes after out-of-memory: the first lighter sizes that are estimated to fit, and what nobody knows."""

from typing import Any

import pytest

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.estimates.size_estimate import TrainingPlace, estimate_memory
from cairn.tasks.policy.attempt_sizes import MARGIN, AttemptSizes, MemoryRoom, choose_lighter, lighter_sizes

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
