"""Deferred metrics: the same bits and records, and a bad step fetched later has changed nothing."""

import numpy as np
import pytest
import torch

from cairn.model.data.token_windows import TokenWindows
from cairn.model.errors import NonFiniteLoss, TokenOutOfRange
from cairn.model.training.training_loop import (
    FETCH_EVERY_STEP,
    FetchSchedule,
    Probe,
    default_fetch_schedule,
)
from tests.model.tiny_run import TinyRun

STEPS, BAD_STEP = 12, 6
EXACT = {"precision": "fp32", "kernels": "stock", "model": {"dropout": 0.1}}
NUMERICS = {
    "fp32": EXACT,
    "fp32 fused": {**EXACT, "kernels": "fused"},
    "bf16 fused, accumulating": {**EXACT, "precision": "bf16", "kernels": "fused", "micro_batch": 4},
    "unclipped": {**EXACT, "grad_clip": 0.0},
}
DEFERRED = FetchSchedule(every_steps=5, every_seconds=1e9)


def train(run, until_step, schedule, **how):
    """Return the records, and the error that ended the training or None."""
    try:
        return run.train(until_step, schedule=schedule, **how), None
    except (NonFiniteLoss, TokenOutOfRange) as error:
        return run.records, error


def values_of(records):
    return [(r.step, r.train_loss, r.lr, r.grad_norm, r.probe_loss, r.sample) for r in records]


def poison(run, step, *, gradient=False):
    """Make the loss or the gradient of one step not finite, as often as it is tried, and no other's."""
    weight = run.state.model.ln_f.weight

    def spoil(value):
        return value * float("inf") if run.state.step == step - 1 else value

    if gradient:
        weight.register_hook(spoil)
    else:
        run.state.model.ln_f.register_forward_hook(lambda *given: spoil(given[2]))
    return run


def after_good_steps(run, steps):
    train(run, steps, FETCH_EVERY_STEP)
    return run.bits()


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
def test_deferred_metrics_leave_the_bits_and_records_of_fetching_every_step(numerics) -> None:
    immediate, deferred = TinyRun(**numerics), TinyRun(**numerics)
    expected, _ = train(immediate, STEPS, FETCH_EVERY_STEP)
    got, _ = train(deferred, STEPS, DEFERRED)
    assert values_of(got) == values_of(expected)
    assert deferred.bits() == immediate.bits()


@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient norm"])
@pytest.mark.parametrize("first", [4, 5], ids=["in the middle of a group", "at its start"])
def test_a_bad_step_changes_nothing_however_late_it_is_fetched(gradient, first) -> None:
    run = poison(TinyRun(**EXACT), BAD_STEP, gradient=gradient)
    records, error = train(run, STEPS, FetchSchedule(every_steps=first, every_seconds=1e9))
    assert (type(error), error.step, len(records)) == (NonFiniteLoss, BAD_STEP, BAD_STEP - 1)
    assert run.bits() == after_good_steps(TinyRun(**EXACT), BAD_STEP - 1)


def test_a_bad_step_names_the_windows_that_fetching_every_step_names() -> None:
    parts = {**EXACT, "micro_batch": 2}
    errors = [
        train(poison(TinyRun(**parts), BAD_STEP), STEPS, schedule)[1] for schedule in (FETCH_EVERY_STEP, DEFERRED)
    ]
    seen = [(error.step, error.quantity, str(error.value), error.windows) for error in errors]
    assert seen[0] == seen[1]


def test_training_can_go_on_after_a_bad_step() -> None:
    run, undisturbed = poison(TinyRun(**EXACT), BAD_STEP), TinyRun(**EXACT)
    train(run, STEPS, DEFERRED)
    run.state.model.ln_f._forward_hooks.clear()
    train(run, STEPS, DEFERRED)
    assert run.bits() == after_good_steps(undisturbed, STEPS)


def test_a_bad_step_before_a_bad_token_is_the_one_that_is_raised() -> None:
    class Bad(TokenWindows):
        def gather(self, indexes, into=None):
            if run.state.step == BAD_STEP + 1:
                raise TokenOutOfRange(window=0, token=99, vocab_size=61)
            return super().gather(indexes, into)

    for run in (TinyRun(**EXACT), poison(TinyRun(**EXACT), BAD_STEP)):
        windows = Bad(run.windows._shards, 8, 61)
        records, error = train(run, STEPS, FetchSchedule(every_steps=50, every_seconds=1e9), windows=windows)
        wanted = (NonFiniteLoss, 5) if len(records) == BAD_STEP - 1 else (TokenOutOfRange, BAD_STEP + 1)
        assert (type(error), run.state.step) == wanted
        assert len(records) == run.state.step


def test_a_stop_takes_effect_after_the_running_step_and_every_step_is_fetched() -> None:
    run, answers = TinyRun(**EXACT), iter([False, False, True])
    records, _ = train(run, STEPS, DEFERRED, stop=lambda: next(answers))
    assert [record.step for record in records] == [1, 2, 3]
    assert (run.state.step, run.stopped) == (3, True)


def test_a_scheduled_step_is_fetched_before_the_next_one_begins() -> None:
    run, seen = TinyRun(**EXACT), []
    schedule = FetchSchedule(every_steps=50, every_seconds=1e9, at_steps=(3, 7))
    train(run, STEPS, schedule, watched=lambda record: seen.append((record.step, run.state.step)))
    assert seen == [(1, 3), (2, 3), (3, 3), *((step, 7) for step in (4, 5, 6, 7)), *((n, 12) for n in range(8, 13))]


def test_a_stop_requested_in_the_report_of_a_scheduled_step_takes_effect_at_that_step() -> None:
    run, asked = TinyRun(**EXACT), []
    schedule = FetchSchedule(every_steps=50, every_seconds=1e9, at_steps=(7,))
    watched = lambda record: asked.append(1) if record.step == 7 else None  # noqa: E731
    train(run, STEPS, schedule, stop=lambda: bool(asked), watched=watched)
    assert (run.state.step, run.stopped) == (7, True)


def test_a_probe_measures_the_weights_of_its_own_step() -> None:
    def probed(schedule):
        run = TinyRun(**EXACT)
        rhythm = run.training.model_copy(update={"probe_every_steps": 4, "probe_batches": 1, "sample_tokens": 0})
        probe = Probe(windows=run.windows, training=rhythm, prompt_ids=[1], decode=str)
        return values_of(train(run, STEPS, schedule, probe=probe)[0])

    assert probed(DEFERRED) == probed(FETCH_EVERY_STEP)


def test_steps_fetched_together_share_their_time() -> None:
    ticks = iter(range(0, 1000, 2))
    records, _ = train(
        TinyRun(**EXACT), 4, FetchSchedule(every_steps=2, every_seconds=1e9), clock=lambda: float(next(ticks))
    )
    assert [record.seconds for record in records] == [3.0] * 4  # begun, two launches, one fetch: six seconds for two
    assert {record.tokens_per_second for record in records} == {6 * 8 / 3.0}


def test_slow_steps_are_not_pending_for_long() -> None:
    ticks, run, seen = iter(range(0, 1000, 2)), TinyRun(**EXACT), []
    schedule = FetchSchedule(every_steps=50, every_seconds=3.5)
    train(run, 4, schedule, clock=lambda: float(next(ticks)), watched=lambda record: seen.append(run.state.step))
    assert seen == [2, 2, 4, 4]


def test_a_cpu_and_fp16_fetch_every_step() -> None:
    assert default_fetch_schedule(TinyRun(**EXACT).state) == FETCH_EVERY_STEP
    run = TinyRun(**{**EXACT, "precision": "fp16", "model": {}})
    train(run, 3, DEFERRED)
    assert not hasattr(run.state.optimizers[0], "found_inf")


def test_the_guard_leaves_the_optimizer_after_the_loop() -> None:
    run = TinyRun(**EXACT)
    train(run, 3, DEFERRED)
    assert not hasattr(run.state.optimizers[0], "found_inf")


def test_the_optimizer_of_this_version_reads_the_flag() -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.full((3,), np.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(weight, torch.ones(3)) and float(optimizer.state[weight]["step"]) == 0
