"""Which windows of a failed batch are bad: all of those and no other; and when a loss has spiked."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.model.data.token_windows import TokenWindows
from cairn.model.kernels.head_loss import head_loss
from cairn.model.training import training_step
from cairn.model.training.training_step import BASELINE_STEPS, find_bad_windows, find_spike
from tests.model.tiny_run import TinyRun


def drawn(run):
    return run.order.windows_of(run.state.step)


def poison_token(run, token: int, value: float) -> None:
    with torch.no_grad():
        run.state.model.wte.weight[token] = value


def only_in(run, window: int) -> int:
    """Return an input token that this window of the batch has and no other."""
    gathered = run.windows.gather(drawn(run))
    rows = {int(index): set(row[:-1].tolist()) for index, row in zip(drawn(run), gathered, strict=True)}
    others = set().union(*(tokens for index, tokens in rows.items() if index != window))
    return next(iter(rows[window] - others))


def test_a_sound_batch_has_no_bad_window() -> None:
    run = TinyRun()
    assert find_bad_windows(run.state, run.windows, drawn(run), training=run.training) == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_embedding_makes_every_window_bad_through_the_tied_head(value) -> None:
    run = TinyRun()
    poison_token(run, 7, value)
    assert set(find_bad_windows(run.state, run.windows, drawn(run), training=run.training)) == set(drawn(run).tolist())


def test_a_token_of_one_window_alone_makes_that_window_bad_alone() -> None:
    run = TinyRun()
    bad = int(drawn(run)[2])
    token = only_in(run, bad)
    run.state.network = lambda tokens, _: (
        run.state.model(tokens) / (tokens != token).all()
    )  # 0/0 or x/0 where it occurs
    assert find_bad_windows(run.state, run.windows, drawn(run), training=run.training) == (bad,)


def test_a_token_outside_the_vocabulary_makes_its_window_bad() -> None:
    run = TinyRun()
    tokens = np.concatenate(run.windows._shards).copy()
    bad = int(drawn(run)[3])
    tokens[bad * run.windows.block_size + 1] = 60000
    windows = TokenWindows([tokens], run.windows.block_size, run.windows.vocab_size)
    assert find_bad_windows(run.state, windows, drawn(run), training=run.training) == (bad,)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_failure_of_the_runs_own_kernels_is_found_with_them(monkeypatch: pytest.MonkeyPatch, precision) -> None:
    run = TinyRun(precision=precision, kernels="fused")
    bad = int(drawn(run)[2])
    token = only_in(run, bad)

    def failing(hidden, weight, targets, z_loss, *, is_padded):
        return head_loss(hidden, weight, targets) / (targets != token).all()

    monkeypatch.setattr(training_step, "head_loss", failing)
    assert bad in find_bad_windows(run.state, run.windows, drawn(run), training=run.training)
    stock = run.training.model_copy(update={"kernels": "stock"})
    assert find_bad_windows(run.state, run.windows, drawn(run), training=stock) == ()


def test_the_trial_changes_no_bit() -> None:
    run = TinyRun(model={"dropout": 0.1})
    run.train(2)
    before = run.bits()
    find_bad_windows(run.state, run.windows, drawn(run), training=run.training)
    assert run.bits() == before


FALLING = [5.0 - 0.01 * step for step in range(BASELINE_STEPS)]


def ask(losses):
    return find_spike(losses, patience=8, rise=1.5)


def test_a_loss_that_rises_and_stays_high_is_a_spike() -> None:
    spike = ask([*FALLING, *[7.0] * 8])
    assert spike is not None and spike[0] == 7.0


@pytest.mark.parametrize("tail", [[7.0] * 7 + [4.4], [4.4] * 8, [5.5] * 8, [30.0] + [4.4] * 7])
def test_one_bad_step_a_plateau_and_a_small_rise_are_no_spike(tail) -> None:
    assert ask([*FALLING, *tail]) is None


def test_too_short_a_history_has_no_spike() -> None:
    assert ask([*FALLING[1:], *[9.0] * 8]) is None


@given(st.lists(st.floats(0.0, 10.0), min_size=BASELINE_STEPS + 8, max_size=BASELINE_STEPS + 40))
def test_a_spike_lies_above_its_baseline_in_every_step(losses) -> None:
    spike = ask(losses)
    if spike is not None:
        assert all(loss > spike[1] + 1.5 for loss in losses[-8:])
