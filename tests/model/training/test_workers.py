"""Workers change no bit: a sum's order is that of the tree over micro-batches, whoever computes a part of it."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from cairn.model.configuration.training import auto_micro_batch
from cairn.model.errors import NonFiniteLoss
from cairn.model.training import training_step
from cairn.model.training.gradient_sum import Workers
from tests.model.tiny_run import TinyRun

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32 fused": {"kernels": "fused", "z_loss": 0.01},
    "bf16 fused": {"precision": "bf16", "kernels": "fused"},
    "bf16 moved by muon": {"precision": "bf16", "kernels": "fused", "optimizer": "muon"},
    "recomputed": {"activation_checkpointing": True},
    "adapters": {"kernels": "fused", "lora": {"rank": 2}},
}
SHAPES: dict[str, dict[str, Any]] = {
    "bf16 moved by muon": {"architecture": "qwen3", "n_kv_head": 1},
    "fp32 fused": {"ngram_rows": [5]},
}


def trained(mode: str, workers: int, batch: int, micro_batch: int, steps: int = 2) -> Mapping[str, bytes]:
    run = TinyRun(model=SHAPES.get(mode), global_batch=batch, micro_batch=micro_batch, **MODES[mode])
    run.state.workers = Workers(workers)
    run.train(steps)
    return run.bits()


@pytest.mark.parametrize("mode", MODES)
def test_any_number_of_workers_computes_the_bits_of_one(mode: str) -> None:
    alone = trained(mode, 1, 7, 1)
    assert all(trained(mode, workers, 7, 1) == alone for workers in (3, 9))


@pytest.mark.parametrize("passes", [1, 2, 3, 5, 6, 8, 12, 13])
def test_any_number_of_micro_batches_is_shared(passes: int) -> None:
    alone = trained("fp32", 1, passes, 1, steps=1)
    assert all(trained("fp32", workers, passes, 1, steps=1) == alone for workers in (2, 3, 5))


def test_a_last_micro_batch_may_be_smaller() -> None:
    assert trained("fp32", 3, 11, 2) == trained("fp32", 1, 11, 2)


def test_a_run_goes_on_with_another_number_of_workers_where_it_stopped() -> None:
    run = TinyRun(global_batch=6, micro_batch=1)
    for until, workers in ((1, 1), (2, 3), (3, 2)):
        run.state.workers = Workers(workers)
        run.train(until)
    assert run.bits() == trained("fp32", 1, 6, 1, steps=3)


@pytest.mark.parametrize("error", [MemoryError, IndexError])
def test_an_error_of_one_worker_ends_the_step_when_none_computes_any_more(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mean_loss, inside = TinyRun(global_batch=8, micro_batch=1), training_step.mean_loss, set[int]()

    def break_in_another(*given: Any) -> torch.Tensor:
        inside.add(threading.get_ident())
        if threading.current_thread() is not threading.main_thread():
            raise error("no room")
        found = mean_loss(*given)
        inside.discard(threading.get_ident())
        return found

    run.state.workers = Workers(3)
    monkeypatch.setattr(training_step, "mean_loss", break_in_another)
    before = run.bits()
    with pytest.raises(error, match="no room"):
        run.train(1)
    assert threading.get_ident() not in inside and run.bits() == before


def test_a_loss_that_is_not_finite_names_its_windows_whoever_computed_it() -> None:
    def windows(workers: int) -> tuple[int, ...]:
        run = TinyRun(global_batch=6, micro_batch=2)
        run.state.workers = Workers(workers)
        with torch.no_grad():
            run.state.model.wte.weight[int(run.windows.gather(run.order.windows_of(0)[3:4])[0, 0])] = float("nan")
        with pytest.raises(NonFiniteLoss) as error:
            run.train(1)
        return tuple(error.value.windows)

    assert windows(3) == windows(1)


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


@pytest.mark.parametrize(
    ("batch", "block", "on_cpu", "windows"),
    [
        (32, 128, True, 8),
        (12, 64, True, 6),
        (7, 64, True, 7),
        (16, 64, True, 8),
        (4, 1024, True, 1),
        (64, 256, True, 8),
        (480, 1024, True, 15),
        (480, 1024, False, 15),
        (64, 256, False, 64),
        (3, 32_768, False, 1),
        (1, 8, True, 1),
        (10, 1024, True, 2),
    ],
)
def test_auto_cuts_a_batch_by_its_tokens(batch: int, block: int, on_cpu: bool, windows: int) -> None:
    assert auto_micro_batch(batch, block, on_cpu=on_cpu) == windows
