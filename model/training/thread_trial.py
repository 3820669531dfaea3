"""Times steps of a run's network, cut to one layer and few windows, with several thread counts; leaves no trace."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np
import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data import sample_order, token_windows
from cairn.model.training import determinism, train_state, training_step

_CPU = torch.device("cpu")
_TOKENS, _VOCABULARY = 256, 1024
_FEWEST_TURNS, _MOST_TURNS, _BUDGET_SECONDS = 3, 9, 0.15
"""A turn is one step with each number of threads; after the fewest turns none begins when the seconds are spent."""


def time_steps(
    model: ModelConfig,
    training: TrainingConfig,
    threads: Sequence[int],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Mapping[int, float]:
    """Return the median seconds of a step for each number of threads, in turns, so that other load meets all alike."""
    before = torch.get_num_threads()
    found: dict[int, list[float]] = {count: [] for count in threads}
    with determinism.keeping_generators(_CPU):
        rows = max(1, min(training.global_batch, _TOKENS // model.block_size))
        changes = dict(steps=1000, global_batch=rows, micro_batch=rows, compile=False, mask_documents=False)
        few = training.model_copy(update=changes)
        tokens = np.random.default_rng(0).integers(0, _VOCABULARY, (rows + 1) * model.block_size + 1)
        windows = token_windows.TokenWindows([tokens.astype(np.uint16)], model.block_size, _VOCABULARY)
        order = sample_order.SampleOrder(window_count=windows.window_count, seed=0, global_batch=rows)
        state = train_state.TrainState.create(model.model_copy(update={"n_layer": 1}), few, _VOCABULARY, _CPU)
        state.model.train()
        inputs = training_step.StepInputs(windows=windows, order=order, training=few, micro_batch=rows)
        try:
            training_step.take_step(state, inputs)  # kernels are chosen and memory is taken in the first step
            began = clock()
            for turn in range(_MOST_TURNS):
                if turn >= _FEWEST_TURNS and clock() - began > _BUDGET_SECONDS:
                    break
                for count in threads:
                    torch.set_num_threads(count)
                    started = clock()
                    training_step.take_step(state, inputs)
                    found[count].append(clock() - started)
        finally:
            torch.set_num_threads(before)
    return {count: median(seconds) for count, seconds in found.items()}
