"""The loop: where it stops, what it records, what it learns."""

import math

import numpy as np
import pytest

from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.errors import InvalidInput
from cairn.model.training.optimizer import learning_rate
from cairn.model.training.training_loop import StepObserver, train_until
from tests.model.tiny_run import TinyRun


def test_one_batch_is_memorized(tiny_run: type[TinyRun]) -> None:
    run = tiny_run(steps=150, lr=1e-2, min_lr=1e-2, warmup_steps=5, weight_decay=0.0, model={"n_embd": 32})
    run.windows = TokenWindows([np.random.default_rng(1).integers(0, 61, 49).astype(np.uint16)], 8, 61)
    run.order = SampleOrder(window_count=6, seed=0, global_batch=6)
    losses = [record.train_loss for record in run.train(150)]
    assert abs(losses[0] - math.log(61)) < 0.2
    assert losses[-1] < 0.3


def test_every_step_has_one_record_numbered_from_1(tiny_run: type[TinyRun]) -> None:
    assert [record.step for record in tiny_run().train(5)] == [1, 2, 3, 4, 5]


def test_records_carry_the_rate_of_their_step(tiny_run: type[TinyRun]) -> None:
    run = tiny_run()
    training = TrainingConfig(steps=12, warmup_steps=2, lr=1e-3, min_lr=1e-4)
    expected = [learning_rate(n, training) for n in range(1, 13)]
    assert [record.lr for record in run.train(12)] == expected


def test_records_measure_the_machine(tiny_run: type[TinyRun]) -> None:
    record = tiny_run().train(1)[0]
    assert min(record.tokens_per_second, record.mfu, record.memory_bytes, record.seconds, record.grad_norm) > 0


def test_speed_is_tokens_by_the_given_clock(tiny_run: type[TinyRun]) -> None:
    run, ticks, records = tiny_run(), iter(range(0, 100, 2)), []
    observer = StepObserver(on_step=records.append, stop_requested=lambda: False, clock=lambda: float(next(ticks)))
    train_until(run.state, run.inputs(micro_batch=6), observer, until_step=2)
    assert [(r.seconds, r.tokens_per_second) for r in records] == [(2.0, 6 * 8 / 2.0)] * 2


def test_a_stop_takes_effect_after_the_running_step(tiny_run: type[TinyRun]) -> None:
    run, answers = tiny_run(), iter([False, False, True])
    assert len(run.train(12, stop=lambda: next(answers))) == 3
    assert (run.state.step, run.stopped) == (3, True)


def test_training_in_segments_equals_training_at_once(tiny_run: type[TinyRun]) -> None:
    whole, parts = tiny_run(model={"dropout": 0.1}), tiny_run(model={"dropout": 0.1})
    whole.train(9)
    for until_step in (1, 4, 4, 9):
        parts.train(until_step)
    assert parts.bits() == whole.bits()


def test_a_continued_run_draws_the_windows_the_undisturbed_one_would(tiny_run: type[TinyRun]) -> None:
    class Watched(TokenWindows):
        seen: list[int]

        def gather(self, indexes, into=None):
            self.seen.extend(indexes.tolist())
            return super().gather(indexes, into)

    def watched(run, until_step):
        windows = Watched(run.windows._shards, 8, 61)
        windows.seen = []
        run.train(until_step, windows=windows)
        return windows.seen

    undisturbed, killed, continued = tiny_run(), tiny_run(), tiny_run()
    expected = watched(undisturbed, 12)
    before = watched(killed, 5)
    continued.state.load(killed.tensors())
    assert before + watched(continued, 12) == expected


def test_an_order_over_other_data_is_refused(tiny_run: type[TinyRun]) -> None:
    run = tiny_run()
    run.order = SampleOrder(window_count=7, seed=0, global_batch=6)
    with pytest.raises(InvalidInput, match="order covers 7 windows"):
        run.train(1)


def test_another_masking_than_the_networks_is_refused(tiny_run: type[TinyRun]) -> None:
    with pytest.raises(InvalidInput, match=r"mask_documents=True .* boundary_id=None"):
        tiny_run(mask_documents=True).train(1)


def test_masked_training_in_segments_equals_training_at_once_and_differs_from_unmasked(tiny_run: type[TinyRun]) -> None:
    plain, whole, parts = tiny_run(), tiny_run(mask_documents=True), tiny_run(mask_documents=True)
    whole.state.model.boundary_id = parts.state.model.boundary_id = 7
    plain.train(9)
    whole.train(9)
    for until_step in (4, 9):
        parts.train(until_step)
    assert parts.bits() == whole.bits() != plain.bits()
