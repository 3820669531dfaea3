"""The digest of the weights in every step record: any flipped bit changes it, and nothing but the weights does."""

import pytest
import torch

from cairn.model.training.parallel import Ranks
from cairn.model.training.training_loop import FetchSchedule, StepObserver, train_until
from tests.model.tiny_run import TinyRun


def digests(run: TinyRun, until: int, schedule: FetchSchedule | None = None) -> list[str | None]:
    found: list[str | None] = []
    observer = StepObserver(
        on_step=lambda result: found.append(result.weights_digest), stop_requested=lambda: False, probe=None
    )
    train_until(run.state, run.inputs(), observer, until_step=until, schedule=schedule)
    return found


@pytest.mark.parametrize("bit", [0, 22, 30, 31])
def test_any_flipped_bit_of_any_weight_changes_the_digest(bit: int) -> None:
    state = TinyRun().state
    seen = {int(state.weights_sum())}
    for named in state.live_tensors():
        if named.group == "weights":
            named.tensor.view(torch.int32).view(-1)[-1] ^= -(2**31) if bit == 31 else 1 << bit
            seen.add(int(state.weights_sum()))
    assert len(seen) == 1 + len(list(state.model.parameters()))


def test_two_runs_with_equal_weights_have_equal_digests_step_by_step() -> None:
    first, second = digests(TinyRun(), 4), digests(TinyRun(), 4)
    assert first == second and len(set(first)) == 4


def test_steps_whose_metrics_are_fetched_later_have_the_same_digests() -> None:
    deferred = FetchSchedule(every_steps=3, every_seconds=1e9)
    assert digests(TinyRun(), 4, deferred) == digests(TinyRun(), 4)


def test_a_rank_that_holds_only_its_part_of_the_weights_has_no_digest() -> None:
    state = TinyRun().state
    state.ranks = Ranks(0, 2, "fsdp")
    assert state.weights_sum() is None
