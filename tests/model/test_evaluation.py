"""Held-out metrics."""

import math

import pytest
import torch

from cairn.model.data.token_windows import TokenWindows
from cairn.model.inference.prediction import evaluate, held_out_loss
from cairn.model.kernels import head_loss
from tests.model.tiny_run import TinyRun

NETWORKS = {"gpt2": {}, "qwen3": {"architecture": "qwen3", "n_kv_head": 1}}
both = pytest.mark.parametrize("shape", NETWORKS.values(), ids=NETWORKS)


def measure(run, **changes):
    return evaluate(run.state.model, run.windows, **{"batches": 3, "batch_size": 4, "bytes_per_token": 2.0, **changes})


@both
def test_the_same_model_has_the_same_metrics(tiny_run: type[TinyRun], shape) -> None:
    run = tiny_run(model={"dropout": 0.5, **shape})
    assert measure(run) == measure(run)


def test_metrics_are_one_loss_in_three_units(tiny_run: type[TinyRun]) -> None:
    metrics = measure(tiny_run())
    assert metrics.perplexity == pytest.approx(math.exp(metrics.val_loss))
    assert metrics.bits_per_byte == pytest.approx(metrics.val_loss / math.log(2) / 2.0)


def test_the_batch_size_does_not_change_the_loss_of_the_slice(tiny_run: type[TinyRun]) -> None:
    run = tiny_run()
    assert measure(run, batches=4, batch_size=3).val_loss == pytest.approx(measure(run).val_loss, rel=1e-6)


@both
def test_windows_of_a_last_batch_that_is_not_full_count_as_much_as_others(tiny_run: type[TinyRun], shape) -> None:
    run = tiny_run(model=shape)
    windows, count = run.windows, run.windows.window_count
    one_by_one = measure(run, batches=count, batch_size=1).val_loss
    for batch_size in (count - 1, count // 2 + 1):
        loss, measured = held_out_loss(run.state.model, windows, batches=count, batch_size=batch_size)
        assert (loss, measured) == (pytest.approx(one_by_one, rel=1e-6), count)


@both
def test_few_logits_exist_at_a_time_and_the_loss_is_that_of_all(
    tiny_run: type[TinyRun], monkeypatch: pytest.MonkeyPatch, shape
) -> None:
    run, rows = tiny_run(model=shape), list[int]()
    whole = measure(run).val_loss
    linear = head_loss.F.linear
    monkeypatch.setattr(head_loss, "HELD_OUT_CHUNK_BYTES", 4 * 61 * 5)
    monkeypatch.setattr(head_loss.F, "linear", lambda x, w: (rows.append(len(x)), linear(x, w))[1])
    model = run.state.model
    monkeypatch.setattr(model, "hidden", lambda ids: torch.zeros(*ids.shape, 16))
    measure(run)
    assert max(rows) == 5
    monkeypatch.undo()
    monkeypatch.setattr(head_loss, "HELD_OUT_CHUNK_BYTES", 4 * 61 * 5)
    assert measure(run).val_loss == pytest.approx(whole, rel=1e-6)


def test_samples_counts_the_windows_that_were_there(tiny_run: type[TinyRun]) -> None:
    run = tiny_run()
    assert measure(run).samples == 12
    assert measure(run, batches=1000).samples == run.windows.window_count


@pytest.mark.parametrize(("wanted", "chosen"), [(4, [0, 25, 50, 75]), (1000, list(range(100)))])
def test_the_slice_is_spread_over_all_windows(
    tiny_run: type[TinyRun], monkeypatch: pytest.MonkeyPatch, wanted, chosen
) -> None:
    run, gathered = tiny_run(), []
    gather = run.windows.gather
    monkeypatch.setattr(TokenWindows, "window_count", 100)
    monkeypatch.setattr(TokenWindows, "gather", lambda _, part: gathered.extend(part.tolist()) or gather(part * 0))
    assert held_out_loss(run.state.model, run.windows, batches=1, batch_size=wanted)[1] == len(chosen)
    assert gathered == chosen


@both
def test_evaluating_draws_no_random_number(tiny_run: type[TinyRun], shape) -> None:
    run = tiny_run(model={"dropout": 0.5, **shape})
    before = torch.get_rng_state()
    measure(run)
    assert torch.equal(torch.get_rng_state(), before)


@both
def test_a_network_that_masks_documents_is_measured_masked(tiny_run: type[TinyRun], shape) -> None:
    plain, masked = tiny_run(model=shape), tiny_run(model=shape)
    masked.state.model.boundary_id = 7
    assert measure(masked, batches=1000).val_loss != measure(plain, batches=1000).val_loss
