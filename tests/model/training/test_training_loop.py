"""The loop: where it stops, what it records, measures and learns, and the digest of the weights in its records."""

import math

import numpy as np
import pytest
import torch

from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.errors import InvalidInput
from cairn.model.training.optimizer import learning_rate
from cairn.model.training.parallel import Ranks
from cairn.model.training.training_loop import FetchSchedule, Probe
from tests.model.tiny_run import TinyRun


def test_one_batch_is_memorized() -> None:
    run = TinyRun(steps=150, lr=1e-2, min_lr=1e-2, warmup_steps=5, weight_decay=0.0, model={"n_embd": 32})
    run.windows = TokenWindows([np.random.default_rng(1).integers(0, 61, 49).astype(np.uint16)], 8, 61)
    run.order = SampleOrder(window_count=6, seed=0, global_batch=6)
    losses = [record.train_loss for record in run.train(150)]
    assert abs(losses[0] - math.log(61)) < 0.2
    assert losses[-1] < 0.3


def test_every_step_has_one_record_numbered_from_1() -> None:
    assert [record.step for record in TinyRun().train(5)] == [1, 2, 3, 4, 5]


def test_records_carry_the_rate_of_their_step() -> None:
    run = TinyRun()
    training = TrainingConfig(steps=12, warmup_steps=2, lr=1e-3, min_lr=1e-4)
    expected = [learning_rate(n, training) for n in range(1, 13)]
    assert [record.lr for record in run.train(12)] == expected


def test_records_measure_the_machine() -> None:
    record = TinyRun().train(1)[0]
    assert min(record.tokens_per_second, record.mfu, record.memory_bytes, record.seconds, record.grad_norm) > 0


def test_speed_is_tokens_by_the_given_clock() -> None:
    ticks = iter(range(0, 100, 2))
    records = TinyRun().train(2, clock=lambda: float(next(ticks)))
    assert [(r.seconds, r.tokens_per_second) for r in records] == [(2.0, 6 * 8 / 2.0)] * 2


def test_training_in_segments_equals_training_at_once() -> None:
    whole, parts = TinyRun(model={"dropout": 0.1}), TinyRun(model={"dropout": 0.1})
    whole.train(9)
    for until_step in (1, 4, 4, 9):
        parts.train(until_step)
    assert parts.bits() == whole.bits()


def test_an_order_over_other_data_is_refused() -> None:
    run = TinyRun()
    run.order = SampleOrder(window_count=7, seed=0, global_batch=6)
    with pytest.raises(InvalidInput, match="order covers 7 windows"):
        run.train(1)


def test_another_masking_than_the_networks_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"mask_documents=True .* boundary_id=None"):
        TinyRun(mask_documents=True).train(1)


def test_masked_training_in_segments_equals_training_at_once_and_differs_from_unmasked() -> None:
    plain, whole, parts = TinyRun(), TinyRun(mask_documents=True), TinyRun(mask_documents=True)
    whole.state.model.boundary_id = parts.state.model.boundary_id = 7
    plain.train(9)
    whole.train(9)
    for until_step in (4, 9):
        parts.train(until_step)
    assert parts.bits() == whole.bits() != plain.bits()


def probe_of(run, **changes):
    settings = {"probe_every_steps": 2, "probe_batches": 2, "sample_tokens": 5, **changes}
    training = run.training.model_copy(update=settings)
    return Probe(windows=run.windows, training=training, prompt_ids=(0,), decode=lambda ids: " ".join(map(str, ids)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_with_a_probe_gives_the_bits_of_training_without(precision) -> None:
    probed, plain = (TinyRun(precision=precision, model={"dropout": 0.2}) for _ in range(2))
    probed.train(7, probe=probe_of(probed))
    plain.train(7)
    assert probed.bits() == plain.bits()


def test_the_probe_is_due_every_so_many_steps() -> None:
    run = TinyRun()
    records = run.train(5, probe=probe_of(run))
    assert [record.step for record in records if record.probe_loss is not None] == [2, 4]


def test_a_probe_that_is_due_brings_loss_and_sample() -> None:
    run = TinyRun()
    record = run.train(2, probe=probe_of(run))[-1]
    assert 3 < record.probe_loss < 5 and len(record.sample.split()) == 5


def test_without_sample_tokens_there_is_no_sample() -> None:
    run = TinyRun()
    assert probe_of(run, sample_tokens=0).measure(run.state.model)[1] is None


def test_the_model_is_back_in_its_mode_after_a_probe() -> None:
    run = TinyRun()
    for mode in (True, False):
        run.state.model.train(mode)
        probe_of(run).measure(run.state.model)
        assert run.state.model.training is mode


def digests(until: int, schedule: FetchSchedule | None = None) -> list[str | None]:
    return [record.weights_digest for record in TinyRun().train(until, schedule=schedule)]


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
    first, second = digests(4), digests(4)
    assert first == second and len(set(first)) == 4


def test_steps_whose_metrics_are_fetched_later_have_the_same_digests() -> None:
    deferred = FetchSchedule(every_steps=3, every_seconds=1e9)
    assert digests(4, deferred) == digests(4)


def test_a_rank_that_holds_only_its_part_of_the_weights_has_no_digest() -> None:
    state = TinyRun().state
    state.ranks = Ranks(0, 2, "fsdp")
    assert state.weights_sum() is None
