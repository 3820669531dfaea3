"""The verdict on real curves: tiny models on real text, nothing made up; one seed each, two more where it is slow."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.inference.prediction import held_out_loss
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_loop import StepObserver, StepResult, train_until
from cairn.model.training.training_step import StepInputs
from cairn.storage.logs.run_entries import CurveVerdict
from cairn.tasks.policy.curve_statistics import Curve
from cairn.tasks.policy.curve_verdict import VerdictKind, judge
from tests.text.shakespeare import TINY_SHAKESPEARE

VOCAB, BLOCK, BATCH, EVALUATIONS = 257, 32, 8, 12
TEXT: NDArray[np.uint16] = np.frombuffer(TINY_SHAKESPEARE.read_bytes(), dtype=np.uint8).astype(np.uint16)
SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3)))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class RealRun:
    """A model of two layers on bytes of real text; one step may be given a batch of noise instead."""

    seed: int
    train_tokens: int = 60_000
    poisoned_step: int = 0
    training: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        usual = {"steps": 180, "global_batch": BATCH, "precision": "fp32", "kernels": "stock"}
        self.config = TrainingConfig(**{**usual, "seed": self.seed, **self.training})
        start = self.seed * 1000
        self.windows = TokenWindows([TEXT[start : start + self.train_tokens]], BLOCK, VOCAB)
        self.val = TokenWindows([TEXT[-4000:]], BLOCK, VOCAB)
        noise = np.random.default_rng(self.seed).integers(0, VOCAB, self.train_tokens).astype(np.uint16)
        self.noise = TokenWindows([noise], BLOCK, VOCAB)
        self.order = SampleOrder(window_count=self.windows.window_count, seed=self.seed, global_batch=BATCH)
        model = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=BLOCK)
        self.state = TrainState.create(model, self.config, VOCAB, torch.device("cpu"))
        self.records: list[StepResult] = []

    def verdicts(self) -> list[CurveVerdict]:
        """Train to the end and return the verdict of every evaluation on the way."""
        found, val = list[CurveVerdict](), list[tuple[int, float]]()
        every = self.config.steps // EVALUATIONS
        for step in range(every, self.config.steps + 1, every):
            if step - every < self.poisoned_step <= step:
                self._train(self.windows, self.poisoned_step - 1)
                self._train(self.noise, self.poisoned_step)
            self._train(self.windows, step)
            val.append((step, held_out_loss(self.state.model, self.val, batches=4, batch_size=16)[0]))
            found.append(judge(self._curve(val)))
        return found

    def _train(self, windows: TokenWindows, until_step: int) -> None:
        inputs = StepInputs(windows=windows, order=self.order, training=self.config, micro_batch=BATCH)
        observer = StepObserver(on_step=self.records.append, stop_requested=lambda: False)
        train_until(self.state, inputs, observer, until_step=until_step)

    def _curve(self, val: list[tuple[int, float]]) -> Curve:
        return Curve(
            steps=[record.step for record in self.records],
            train_losses=[record.train_loss for record in self.records],
            grad_norms=[record.grad_norm for record in self.records],
            learning_rates=[record.lr for record in self.records],
            grad_clip=self.config.grad_clip,
            val=tuple(val),
            vocab_size=VOCAB,
            total_steps=self.config.steps,
        )


def kinds(run: RealRun) -> list[str]:
    return [verdict.kind for verdict in run.verdicts()]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_normal_run_is_healthy_at_every_evaluation(seed: int) -> None:
    run = RealRun(seed, training={"lr": 3e-3, "min_lr": 3e-4})
    assert set(kinds(run)[1:]) == {VerdictKind.HEALTHY}


@pytest.mark.parametrize("seed", SEEDS)
def test_three_hundred_times_the_learning_rate_diverges_from_the_first_evaluation_on(seed: int) -> None:
    found = kinds(RealRun(seed, training={"steps": 120, "lr": 1.0, "min_lr": 0.1}))
    assert found[:3] == [VerdictKind.DIVERGING] * 3


@pytest.mark.parametrize("seed", SEEDS)
def test_no_learning_rate_to_speak_of_is_stuck_near_the_loss_of_a_uniform_guess(seed: int) -> None:
    verdict = RealRun(seed, training={"lr": 1e-12, "min_lr": 0.0}).verdicts()[-1]
    assert verdict.kind == VerdictKind.STUCK and "ln(257) = 5.55" in verdict.why


@pytest.mark.parametrize("seed", SEEDS)
def test_a_poisoned_batch_without_clipping_is_a_spike_at_its_step(seed: int) -> None:
    run = RealRun(seed, poisoned_step=112, training={"lr": 3e-3, "grad_clip": 0.0})
    before, after = run.verdicts()[6], judge(run._curve([]))
    assert before.kind == VerdictKind.HEALTHY
    assert after.kind == VerdictKind.SPIKING and after.numbers["worst_spike_step"] == 112


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tiny_corpus_read_many_times_is_overfitting(seed: int) -> None:
    verdict = RealRun(seed, train_tokens=600, training={"lr": 3e-3}).verdicts()[-1]
    assert verdict.kind == VerdictKind.OVERFITTING and "× train loss" in verdict.why
