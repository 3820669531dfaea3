"""Prefetching batches: the same bits, the errors of its steps, no thread left."""

import threading
from contextlib import closing

import numpy as np
import pytest
import torch

from cairn.model.data import batch_loader
from cairn.model.data.batch_loader import BatchLoader, gather_batch
from cairn.model.data.sample_order import Component, SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.errors import TokenOutOfRange
from tests.model.tiny_run import TinyRun

CPU = torch.device("cpu")
DROPOUT = {"dropout": 0.1}
BAD_STEP = 7


class WatchedWindows(TokenWindows):
    """Windows that count the batches gathered from them and can hold the next one back."""

    def __init__(self, shards) -> None:
        super().__init__(shards, 8, 61)
        self.gathered, self.threads = 0, set()
        self.may_gather, self.has_gathered = threading.Event(), threading.Semaphore(0)
        self.may_gather.set()

    def gather(self, indexes, into=None):
        assert self.may_gather.wait(240)
        self.gathered += 1
        self.threads.add(threading.current_thread())
        try:
            return super().gather(indexes, into)
        finally:
            self.has_gathered.release()

    def wait_for(self, batches: int) -> None:
        for _ in range(batches):
            assert self.has_gathered.acquire(timeout=240)


@pytest.fixture
def watched() -> WatchedWindows:
    return WatchedWindows(TinyRun().windows._shards)


def loader_of(run, **changes):
    return BatchLoader(run.windows, run.order, CPU, **{"end_step": run.training.steps, **changes})


def with_bad_token(run, window: int) -> None:
    tokens = np.concatenate(run.windows._shards).copy()
    tokens[window * 8 + 4] = 60_000
    run.windows = TokenWindows([tokens], 8, 61)


def only_at_step(order, wanted: int) -> int:
    """Return a window that step `wanted` draws and no step before it, nor any window beside it."""
    before = {int(window) for step in range(wanted) for window in order.windows_of(step)}
    return next(int(window) for window in order.windows_of(wanted) if int(window) not in before)


@pytest.mark.parametrize("micro_batch", [1, 4, 6])
def test_prefetching_changes_no_bit_of_training(micro_batch) -> None:
    plain, ahead = TinyRun(model=DROPOUT), TinyRun(model=DROPOUT)
    plain.train(12, micro_batch=micro_batch)
    with closing(loader_of(ahead)) as loader:
        ahead.train(12, micro_batch=micro_batch, loader=loader)
    assert ahead.bits() == plain.bits()


@pytest.mark.parametrize("steps_ahead", [1, 2, 4])
def test_a_run_resumed_with_a_new_loader_ends_with_the_bits_of_a_run_without_a_loader(
    monkeypatch: pytest.MonkeyPatch, steps_ahead
) -> None:
    monkeypatch.setattr(batch_loader, "STEPS_AHEAD", steps_ahead)
    plain, killed, resumed = (TinyRun(model=DROPOUT) for _ in range(3))
    plain.train(12)
    with closing(loader_of(killed)) as loader:
        killed.train(5, loader=loader)
    resumed.state.load(killed.tensors())
    with closing(loader_of(resumed)) as loader:
        resumed.train(12, loader=loader)
    assert resumed.bits() == plain.bits()


def test_prefetching_changes_no_bit_of_a_mixture_with_a_quarantine() -> None:
    def run():
        made = TinyRun()
        parts = (
            Component(first_window=0, window_count=11, weight=3.0),
            Component(first_window=20, window_count=30, weight=1.0),
        )
        made.order = SampleOrder(
            window_count=50, seed=3, global_batch=6, components=parts, quarantined=frozenset({2, 25})
        )
        return made

    plain, ahead = run(), run()
    plain.train(12)
    with closing(loader_of(ahead)) as loader:
        ahead.train(12, loader=loader)
    assert ahead.bits() == plain.bits()


def test_a_batch_is_a_pure_function_of_its_step() -> None:
    run = TinyRun()
    with closing(loader_of(run)) as loader:
        for step in (0, 1, 5, 6, 2, 2, 11):
            expected = gather_batch(run.windows, run.order.windows_of(step))
            got = loader.batch(step)
            assert torch.equal(got.tokens, expected.tokens) and got.windows == expected.windows


def test_a_batch_does_not_depend_on_the_draws_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun()
    for draws in (1, 13, 4096):
        monkeypatch.setattr(batch_loader, "DRAWS_PER_CALL", draws)
        with closing(loader_of(run)) as loader:
            assert [loader.batch(s).windows for s in range(9)] == [tuple(run.order.windows_of(s)) for s in range(9)]


def test_a_returned_batch_has_its_own_memory() -> None:
    run = TinyRun()
    with closing(loader_of(run)) as loader:
        batches = [loader.batch(step) for step in range(6)]
    expected = [gather_batch(run.windows, run.order.windows_of(step)) for step in range(6)]
    assert all(torch.equal(got.tokens, wanted.tokens) for got, wanted in zip(batches, expected, strict=True))


def test_a_bad_token_is_raised_at_the_step_that_draws_it_with_its_window() -> None:
    run = TinyRun()
    window = only_at_step(run.order, BAD_STEP)
    with_bad_token(run, window)
    with closing(loader_of(run)) as loader, pytest.raises(TokenOutOfRange) as caught:
        run.train(12, loader=loader)
    assert run.state.step == BAD_STEP and caught.value.window == window


def test_a_bad_token_of_a_step_that_is_not_trained_is_never_raised() -> None:
    run, plain = TinyRun(), TinyRun()
    with_bad_token(run, only_at_step(run.order, BAD_STEP))
    with closing(loader_of(run)) as loader:
        run.train(BAD_STEP, loader=loader)
    plain.train(BAD_STEP)
    assert run.bits() == plain.bits()


def test_the_next_batches_are_gathered_in_the_background(watched: WatchedWindows) -> None:
    with closing(BatchLoader(watched, TinyRun().order, CPU, end_step=12)) as loader:
        loader.batch(0)
        watched.wait_for(1 + 2)
        assert watched.gathered == 1 + 2


def test_no_batch_is_gathered_from_the_end_on(watched: WatchedWindows) -> None:
    with closing(BatchLoader(watched, TinyRun().order, CPU, end_step=3)) as loader:
        for step in range(3):
            loader.batch(step)
    assert watched.gathered == 3


def test_nothing_is_gathered_before_the_first_batch_call(watched: WatchedWindows) -> None:
    BatchLoader(watched, TinyRun().order, CPU, end_step=3).close()
    assert watched.gathered == 0


def test_forget_gathers_prefetched_batches_again() -> None:
    run = TinyRun()
    tokens = np.concatenate(run.windows._shards).copy()
    run.windows = WatchedWindows([tokens])
    with closing(loader_of(run)) as loader:
        loader.batch(0)
        run.windows.wait_for(3)
        tokens[:] = 7
        loader.forget()
        assert (loader.batch(1).tokens == 7).all()


def test_closing_leaves_no_thread_even_with_pending_batches(watched: WatchedWindows) -> None:
    loader = BatchLoader(watched, TinyRun().order, CPU, end_step=12)
    loader.batch(0)
    watched.may_gather.clear()
    threading.Timer(0.01, watched.may_gather.set).start()
    loader.close()
    assert watched.threads and not any(thread.is_alive() for thread in watched.threads)
