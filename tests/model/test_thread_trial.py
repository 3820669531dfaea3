"""The number of threads is part of the arithmetic, so it is chosen by a wide margin, and measuring leaves no trace."""

from collections.abc import Mapping

import pytest
import torch

from cairn.model.estimates.numerics import choose_threads, thread_candidates
from cairn.model.training.training_loop import time_steps
from tests.model.tiny_run import TinyRun


@pytest.mark.parametrize(("cores", "candidates"), [(1, (1,)), (2, (2, 1)), (12, (12, 6, 3, 1))])
def test_all_cores_and_halves_down_to_one_are_tried(cores: int, candidates: tuple[int, ...]) -> None:
    assert thread_candidates(cores) == candidates


@pytest.mark.parametrize(
    ("seconds", "threads"),
    [
        ({2: 0.010, 1: 0.018}, 2),
        ({2: 0.013, 1: 0.010}, 2),
        ({2: 0.019, 1: 0.010}, 2),
        ({2: 0.100, 1: 0.010}, 1),
        ({8: 0.100, 4: 0.019, 2: 0.010, 1: 0.018}, 4),
        ({}, 8),
    ],
    ids=["faster", "slower", "nearly half as fast", "a tenth of the speed", "the most of several", "unknown"],
)
def test_fewer_threads_are_taken_only_where_more_are_far_slower(seconds: Mapping[int, float], threads: int) -> None:
    assert choose_threads(seconds, 8)[0] == threads


def test_the_choice_says_what_was_measured() -> None:
    assert choose_threads({2: 0.1, 1: 0.01}, 2)[1] == "a measured step took 10.0 times as long with 2 threads"


def test_timing_steps_changes_neither_threads_nor_generators_nor_the_bits_of_the_run_after_it() -> None:
    untouched = TinyRun()
    untouched.train(2)
    before, drawn = torch.get_num_threads(), torch.get_rng_state()
    run = TinyRun()
    found = time_steps(run.model_config, run.training, (2, 1))
    assert set(found) == {1, 2} and min(found.values()) > 0
    assert torch.get_num_threads() == before and torch.equal(torch.get_rng_state(), drawn)
    run.train(2)
    assert run.bits() == untouched.bits()


@pytest.mark.parametrize(("precision", "kernels"), [("fp32", "stock"), ("bf16", "fused")])
def test_another_number_of_threads_gives_other_bits_and_equal_numbers_equal_bits_however_many_cores_there_are(
    precision: str, kernels: str
) -> None:
    def bits(threads: int) -> Mapping[str, bytes]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            run = TinyRun(precision=precision, kernels=kernels)
            run.train(2)
            return run.bits()
        finally:
            torch.set_num_threads(before)

    one, four, four_again = bits(1), bits(4), bits(4)
    assert four == four_again != one
