"""Every arithmetic learns real text as fp32 with stock kernels does: no further apart than other seeds lie."""

import statistics

import numpy as np
import pytest
import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_step import StepInputs, take_step
from tests.text.shakespeare import TINY_SHAKESPEARE

pytestmark = [
    pytest.mark.slow,  # quick witnesses: test_fused_block.py, which compares single steps
    pytest.mark.xdist_group("numerics-parity"),  # its runs are made once for all its tests
]

STEPS, SMOOTHED, BATCH = 60, 30, 4
MODEL = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=80)  # more than one block of attention's queries
EXACT = {"precision": "fp32", "kernels": "stock"}
NUMERICS = {
    "fp32 fused": {"kernels": "fused"},
    "bf16 stock": {"precision": "bf16"},
    "bf16 fused": {"precision": "bf16", "kernels": "fused"},
}
A_RATE_A_THIRD_TOO_LOW = {"lr": 2 / 3e3}


def final_loss(*, seed: int = 1, **training) -> float:
    """Train from the seed's weights, on the same samples always; return the mean of the last losses in nats a token."""
    text = np.frombuffer(TINY_SHAKESPEARE.read_bytes(), dtype=np.uint8).astype(np.uint16)
    windows = TokenWindows([text], MODEL.block_size, 256)
    order = SampleOrder(window_count=windows.window_count, seed=1, global_batch=BATCH)
    config = TrainingConfig(
        **{"steps": STEPS, "global_batch": BATCH, "seed": seed, "lr": 1e-3, "warmup_steps": 10, **EXACT, **training}
    )
    state = TrainState.create(MODEL, config, 256, torch.device("cpu"))
    inputs = StepInputs(windows=windows, order=order, training=config, micro_batch=BATCH // 2)
    losses = [take_step(state, inputs).loss for _ in range(config.steps)]
    return statistics.fmean(losses[-SMOOTHED:])


@pytest.fixture(scope="module")
def exact() -> float:
    """Where fp32 with stock kernels ends."""
    torch.set_num_threads(1)
    return final_loss()


@pytest.fixture(scope="module")
def noise(exact: float) -> float:
    """How far apart the same arithmetic ends from other first weights, in nats: one standard deviation."""
    torch.set_num_threads(1)
    return statistics.stdev([exact, *(final_loss(seed=seed) for seed in (2, 3, 4))])


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
def test_every_numerics_ends_within_the_noise_of_fp32(exact: float, noise: float, numerics) -> None:
    assert abs(final_loss(**numerics) - exact) < noise / 2


def test_a_step_that_learns_something_else_ends_far_outside_it(exact: float, noise: float) -> None:
    assert abs(final_loss(**A_RATE_A_THIRD_TOO_LOW) - exact) > 2 * noise
