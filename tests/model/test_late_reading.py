"""Losses read late: the same bits and records, and a bad step found afterwards has changed nothing."""

import numpy as np
import pytest
import torch

from model.data.token_windows import TokenWindows
from model.errors import InvalidInput, NonFiniteLoss, TokenOutOfRange
from model.training.probe import Probe
from model.training.training_loop import AT_ONCE, LoopOutcome, Reading, train_until, usual_reading

STEPS, BAD_STEP = 12, 6
EXACT = {"precision": "fp32", "kernels": "stock", "model": {"dropout": 0.1}}
MODES = {
    "fp32": EXACT,
    "fp32 fused": {**EXACT, "kernels": "fused"},
    "bf16 fused, accumulating": {**EXACT, "precision": "bf16", "kernels": "fused", "micro_batch": 4},
    "unclipped": {**EXACT, "grad_clip": 0.0},
}
LATE = Reading(every_steps=5, every_seconds=1e9)


def train(run, until_step, reading, *, stop=lambda: False, probe=None, clock=None, windows=None, watched=None):
    records = []
    try:
        run.outcome = train_until(
            run.state,
            windows or run.windows,
            run.order,
            until_step=until_step,
            training=run.training,
            micro_batch=run.training.micro_batch,
            on_step=lambda record: (records.append(record), watched and watched(record)),
            stop_requested=stop,
            probe=probe,
            reading=reading,
            **({"clock": clock} if clock else {}),
        )
    except (NonFiniteLoss, TokenOutOfRange) as error:
        return records, error
    return records, None


def said(records):
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
    train(run, steps, AT_ONCE)
    return run.bits()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_late_reading_leaves_the_bits_and_records_of_reading_at_once(tiny_run, mode):
    at_once, late = tiny_run(**mode), tiny_run(**mode)
    expected, _ = train(at_once, STEPS, AT_ONCE)
    got, _ = train(late, STEPS, LATE)
    assert said(got) == said(expected)
    assert late.bits() == at_once.bits()


@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient norm"])
@pytest.mark.parametrize("first", [4, 5], ids=["in the middle of a group", "at its start"])
def test_a_bad_step_changes_nothing_however_late_it_is_read(tiny_run, gradient, first):
    run = poison(tiny_run(**EXACT), BAD_STEP, gradient=gradient)
    records, error = train(run, STEPS, Reading(every_steps=first, every_seconds=1e9))
    assert (type(error), error.step, len(records)) == (NonFiniteLoss, BAD_STEP, BAD_STEP - 1)
    assert run.bits() == after_good_steps(tiny_run(**EXACT), BAD_STEP - 1)


def test_a_bad_step_is_blamed_on_what_reading_at_once_blames(tiny_run):
    parts = {**EXACT, "micro_batch": 2}
    errors = [train(poison(tiny_run(**parts), BAD_STEP), STEPS, reading)[1] for reading in (AT_ONCE, LATE)]
    seen = [(error.step, error.quantity, str(error.value), error.windows) for error in errors]
    assert seen[0] == seen[1]


def test_training_can_go_on_after_a_bad_step(tiny_run):
    run, undisturbed = poison(tiny_run(**EXACT), BAD_STEP), tiny_run(**EXACT)
    train(run, STEPS, LATE)
    run.state.model.ln_f._forward_hooks.clear()
    train(run, STEPS, LATE)
    assert run.bits() == after_good_steps(undisturbed, STEPS)


def test_a_bad_step_before_a_bad_token_is_the_one_that_is_raised(tiny_run):
    class Bad(TokenWindows):
        def gather(self, indexes, into=None):
            if run.state.step == BAD_STEP + 1:
                raise TokenOutOfRange(window=0, token=99, vocab_size=61)
            return super().gather(indexes, into)

    for run in (tiny_run(**EXACT), poison(tiny_run(**EXACT), BAD_STEP)):
        windows = Bad(run.windows._shards, 8, 61)
        records, error = train(run, STEPS, Reading(every_steps=50, every_seconds=1e9), windows=windows)
        wanted = (NonFiniteLoss, 5) if len(records) == BAD_STEP - 1 else (TokenOutOfRange, BAD_STEP + 1)
        assert (type(error), run.state.step) == wanted
        assert len(records) == run.state.step


def test_a_stop_is_obeyed_after_the_step_that_was_running_and_everything_is_read(tiny_run):
    run, answers = tiny_run(**EXACT), iter([False, False, True])
    records, _ = train(run, STEPS, LATE, stop=lambda: next(answers))
    assert [record.step for record in records] == [1, 2, 3]
    assert run.outcome == LoopOutcome(step=3, stopped=True)


def test_a_step_named_beforehand_is_read_before_the_next_one_begins(tiny_run):
    run, seen = tiny_run(**EXACT), []
    reading = Reading(every_steps=50, every_seconds=1e9, at=(3, 7))
    train(run, STEPS, reading, watched=lambda record: seen.append((record.step, run.state.step)))
    assert seen == [(1, 3), (2, 3), (3, 3), *((step, 7) for step in (4, 5, 6, 7)), *((n, 12) for n in range(8, 13))]


def test_a_stop_asked_for_while_a_named_step_is_reported_is_obeyed_at_that_step(tiny_run):
    run, asked = tiny_run(**EXACT), []
    reading = Reading(every_steps=50, every_seconds=1e9, at=(7,))
    watched = lambda record: asked.append(1) if record.step == 7 else None  # noqa: E731
    train(run, STEPS, reading, stop=lambda: bool(asked), watched=watched)
    assert run.outcome == LoopOutcome(step=7, stopped=True)


def test_a_probe_looks_at_the_weights_of_its_own_step(tiny_run):
    def probed(reading):
        run = tiny_run(**EXACT)
        probe = Probe(
            windows=run.windows, every_steps=4, batches=1, batch_size=2, sample_tokens=0, prompt_ids=[1], decode=str
        )
        return said(train(run, STEPS, reading, probe=probe)[0])

    assert probed(LATE) == probed(AT_ONCE)


def test_steps_read_together_share_their_time(tiny_run):
    ticks = iter(range(0, 1000, 2))
    records, _ = train(
        tiny_run(**EXACT), 4, Reading(every_steps=2, every_seconds=1e9), clock=lambda: float(next(ticks))
    )
    assert [record.seconds for record in records] == [3.0] * 4  # begun, looked at twice, read: six seconds for two
    assert {record.tokens_per_second for record in records} == {6 * 8 / 3.0}


def test_slow_steps_are_not_left_unread_for_long(tiny_run):
    ticks, run, seen = iter(range(0, 1000, 2)), tiny_run(**EXACT), []
    reading = Reading(every_steps=50, every_seconds=3.5)
    train(run, 4, reading, clock=lambda: float(next(ticks)), watched=lambda record: seen.append(run.state.step))
    assert seen == [2, 2, 4, 4]


def test_a_cpu_and_fp16_are_read_at_once(tiny_run):
    assert usual_reading(tiny_run(**EXACT).state) == AT_ONCE
    run = tiny_run(**{**EXACT, "precision": "fp16", "model": {}})
    train(run, 3, LATE)
    assert not hasattr(run.state.optimizer, "found_inf")


def test_nothing_watches_the_optimizer_after_the_loop(tiny_run):
    run = tiny_run(**EXACT)
    train(run, 3, LATE)
    assert not hasattr(run.state.optimizer, "found_inf")


def test_a_reading_that_never_comes_is_refused():
    with pytest.raises(InvalidInput, match="every_steps=0"):
        Reading(every_steps=0)


def test_the_optimizer_of_this_version_asks_the_flag():
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.full((3,), np.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(weight, torch.ones(3)) and float(optimizer.state[weight]["step"]) == 0
