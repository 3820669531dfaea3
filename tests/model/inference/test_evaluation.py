"""Held-out metrics."""

import math

import pytest
import torch

from cairn.model.data.token_windows import TokenWindows
from cairn.model.inference.prediction import describe_losses, held_out_loss, window_losses
from cairn.model.kernels import block_sizes, head_loss
from tests.model.tiny_run import TinyRun

NETWORKS = {"gpt2": {}, "qwen3": {"architecture": "qwen3", "n_kv_head": 1}}
both = pytest.mark.parametrize("shape", NETWORKS.values(), ids=NETWORKS)


def measure(run, count: int = 12):
    return describe_losses(window_losses(run.state.model, run.windows, count=count), bytes_per_token=2.0)


@both
def test_the_same_model_has_the_same_metrics(shape) -> None:
    run = TinyRun(model={"dropout": 0.5, **shape})
    assert measure(run) == measure(run)


def test_metrics_are_one_loss_in_three_units() -> None:
    metrics = measure(TinyRun())
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["val_loss"]))
    assert metrics["bits_per_byte"] == pytest.approx(metrics["val_loss"] / math.log(2) / 2.0)


@both
def test_a_windows_loss_is_its_own_however_many_are_measured_with_it(monkeypatch: pytest.MonkeyPatch, shape) -> None:
    run = TinyRun(model=shape)
    together = window_losses(run.state.model, run.windows, count=1000)
    monkeypatch.setattr(block_sizes, "HELD_OUT_TOKENS", 1)
    alone = window_losses(run.state.model, run.windows, count=1000)
    assert len(set(together)) == run.windows.window_count and alone == pytest.approx(together, rel=1e-6)


@both
def test_windows_of_a_last_batch_that_is_not_full_count_as_much_as_others(shape) -> None:
    run = TinyRun(model=shape)
    windows, count = run.windows, run.windows.window_count
    one_by_one = measure(run, count)["val_loss"]
    for batch_size in (count - 1, count // 2 + 1):
        loss, measured = held_out_loss(run.state.model, windows, batches=count, batch_size=batch_size)
        assert (loss, measured) == (pytest.approx(one_by_one, rel=1e-6), count)


@both
def test_few_logits_exist_at_a_time_and_the_loss_is_that_of_all(monkeypatch: pytest.MonkeyPatch, shape) -> None:
    run, rows = TinyRun(model=shape), list[int]()
    whole = measure(run)["val_loss"]
    linear = head_loss.F.linear
    monkeypatch.setattr(head_loss, "HELD_OUT_CHUNK_BYTES", 4 * 61 * 5)
    monkeypatch.setattr(head_loss.F, "linear", lambda x, w: (rows.append(len(x)), linear(x, w))[1])
    model = run.state.model
    monkeypatch.setattr(model, "hidden", lambda ids: torch.zeros(*ids.shape, 16))
    measure(run)
    assert max(rows) == 5
    monkeypatch.undo()
    monkeypatch.setattr(head_loss, "HELD_OUT_CHUNK_BYTES", 4 * 61 * 5)
    assert measure(run)["val_loss"] == pytest.approx(whole, rel=1e-6)


def test_samples_counts_the_windows_that_were_there() -> None:
    run = TinyRun()
    assert measure(run)["samples"] == 12
    assert measure(run, 1000)["samples"] == run.windows.window_count


@pytest.mark.parametrize(("wanted", "chosen"), [(4, [0, 25, 50, 75]), (1000, list(range(100)))])
def test_the_slice_is_spread_over_all_windows(monkeypatch: pytest.MonkeyPatch, wanted, chosen) -> None:
    run, gathered = TinyRun(), []
    gather = run.windows.gather
    monkeypatch.setattr(TokenWindows, "window_count", 100)
    monkeypatch.setattr(TokenWindows, "gather", lambda _, part: gathered.extend(part.tolist()) or gather(part * 0))
    assert held_out_loss(run.state.model, run.windows, batches=1, batch_size=wanted)[1] == len(chosen)
    assert gathered == chosen


@both
def test_evaluating_draws_no_random_number(shape) -> None:
    run = TinyRun(model={"dropout": 0.5, **shape})
    before = torch.get_rng_state()
    measure(run)
    assert torch.equal(torch.get_rng_state(), before)


@both
def test_a_network_that_masks_documents_is_measured_masked(shape) -> None:
    plain, masked = TinyRun(model=shape), TinyRun(model=shape)
    masked.state.model.boundary_id = 7
    assert measure(masked, 1000)["val_loss"] != measure(plain, 1000)["val_loss"]
