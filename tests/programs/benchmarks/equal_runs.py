"""Makes the losses by window of runs that differ in their seed alone: `python -m tests.programs.benchmarks.equal_runs`.

The recipe is the quickstart's, smaller: 300 steps of Muon on 70,000 bytes of text, 5 s a run on an idle core. They are
committed, because 40 runs are too many for a test (`tests/tasks/checkpoints/test_equal_runs.py`).
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.inference.prediction import window_losses
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_loop import StepObserver, train_until
from cairn.model.training.training_step import StepInputs
from tests.text.shakespeare import TINY_SHAKESPEARE

LOSSES = Path(__file__).with_name("equal_runs.npy")
UNIT_NATS = 1e-4
BLOCK, VOCAB, BATCH, STEPS, TRAINED = 64, 257, 16, 300, 70_000
MODEL = ModelConfig(architecture="qwen3", zero_projections=True, n_layer=2, n_head=2, n_embd=48, block_size=BLOCK)


def read_losses() -> NDArray[np.float64]:
    """Return the committed losses in nats a token, a run a row."""
    return np.load(LOSSES).astype(np.float64) * UNIT_NATS


def train(seed: int) -> tuple[float, ...]:
    """Train one run and return its losses over all held-out windows."""
    text = np.frombuffer(TINY_SHAKESPEARE.read_bytes(), dtype=np.uint8).astype(np.uint16)
    windows = TokenWindows([text[:TRAINED]], BLOCK, VOCAB)
    config = TrainingConfig(
        **{"steps": STEPS, "global_batch": BATCH, "seed": seed, "precision": "fp32", "kernels": "stock"},
        **{"optimizer": "muon", "lr": 0.01, "muon_lr": 0.02, "min_lr": 0.0, "warmup_steps": 0, "weight_decay": 0.0},
        **{"schedule": "wsd", "decay_fraction": 0.6},
    )
    state = TrainState.create(MODEL, config, VOCAB, torch.device("cpu"))
    order = SampleOrder(window_count=windows.window_count, seed=seed, global_batch=BATCH)
    inputs = StepInputs(windows=windows, order=order, training=config, micro_batch=BATCH)
    observer = StepObserver(on_step=lambda record: None, stop_requested=lambda: False)
    train_until(state, inputs, observer, until_step=STEPS)
    held_out = TokenWindows([text[TRAINED:]], BLOCK, VOCAB)
    return window_losses(state.model, held_out, count=held_out.window_count)


def main() -> None:
    """Train the runs and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=40)
    torch.set_num_threads(1)
    rows = [train(seed) for seed in range(1, parser.parse_args().runs + 1)]
    np.save(LOSSES, np.round(np.array(rows) / UNIT_NATS).astype(np.uint16))


if __name__ == "__main__":
    main()
