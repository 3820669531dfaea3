"""Real runs of tiny networks on real text, and their curves in `real_curves.jsonl`.

`python -m tests.tasks.policy.real_runs FILE` trains them again, for minutes. `tutorial` and `tutorial-fork` are the
step records of the two runs of docs/tutorial.md on the tests' text.
"""

import argparse as harder
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.inference.prediction import held_out_loss
from cairn.model.training.optimizer import learning_rate
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_loop import StepObserver, StepResult, train_until
from cairn.model.training.training_step import StepInputs
from cairn.tasks.policy.curve_statistics import Curve
from tests.text.shakespeare import TINY_SHAKESPEARE

FILE = Path(__file__).with_name("real_curves.jsonl")
VOCAB, BLOCK, EVALUATIONS = 257, 32, 12
TEXT = np.frombuffer(TINY_SHAKESPEARE.read_bytes(), dtype=np.uint8).astype(np.uint16)
HARDER = np.frombuffer(inspect.getsource(harder).encode(), dtype=np.uint8).astype(np.uint16)
Phases = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RealRun:
    """One run: `phases` are training keys from a step on, `source` chooses the text, `noise_at` are steps of noise."""

    name: str
    expected: str
    phases: Phases
    source: str = "text"
    noise_at: Sequence[int] = ()
    train_tokens: int = 60_000
    width: int = 32
    seed: int = 1
    steps: int = 240
    kept_from: int = 0
    records: list[StepResult] = field(default_factory=list)

    def train(self) -> dict[str, object]:
        """Return the curve as it is stored."""
        phases = {first: configured(self.steps, self.seed, keys) for first, keys in self.phases.items()}
        model = ModelConfig(n_layer=2, n_head=2, n_embd=self.width, block_size=BLOCK)
        state = TrainState.create(model, phases[0], VOCAB, torch.device("cpu"))
        texts, drawn, training, val = self._texts(), np.random.default_rng(self.seed), phases[0], []
        held_out = TokenWindows([(HARDER if self.source == "jump" else TEXT)[-4000:]], BLOCK, VOCAB)
        observer = StepObserver(on_step=self.records.append, stop_requested=lambda: False)
        for step in range(1, self.steps + 1):
            training = phases.get(step - 1, training)
            windows = texts[self._source_of(step, drawn.random())]
            order = SampleOrder(window_count=windows.window_count, seed=self.seed, global_batch=training.global_batch)
            inputs = StepInputs(windows=windows, order=order, training=training, micro_batch=training.global_batch)
            train_until(state, inputs, observer, until_step=step)
            if step % (self.steps // EVALUATIONS) == 0 and step > self.kept_from:
                val.append((step, round(held_out_loss(state.model, held_out, batches=4, batch_size=16)[0], 3)))
        kept = self.records[self.kept_from :]
        norms = [float(f"{record.grad_norm:.3g}") for record in kept]
        losses = [round(record.train_loss, 3) for record in kept]
        described = {"name": self.name, "expected": self.expected, "seed": self.seed, "steps": self.steps}
        return described | {"phases": self.phases, "train_losses": losses, "grad_norms": norms, "val": val}

    def trained_curve(self) -> Curve:
        """Train, and return the curve as it is read back."""
        return _stored(json.loads(json.dumps(self.train()))).curve

    def _texts(self) -> dict[str, TokenWindows]:
        start = self.seed * 1000
        noise = np.random.default_rng(self.seed).integers(0, VOCAB, 20_000).astype(np.uint16)
        arrays = {"text": TEXT[start : start + self.train_tokens], "harder": HARDER[:60_000], "noise": noise}
        return {name: TokenWindows([array], BLOCK, VOCAB) for name, array in arrays.items()}

    def _source_of(self, step: int, drawn: float) -> str:
        if step in self.noise_at:
            return "noise"
        if self.source == "mixture":
            return "harder" if drawn < 0.1 else "text"
        return "harder" if self.source == "jump" and step > self.steps // 2 else "text"


def configured(steps: int, seed: int, keys: Mapping[str, Any]) -> TrainingConfig:
    """Return the training configuration of a phase."""
    usual = {"steps": steps, "global_batch": 8, "precision": "fp32", "kernels": "stock", "lr": 3e-3}
    return TrainingConfig(**{**usual, "seed": seed, **keys})


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """A stored curve, and the verdict that is right."""

    name: str
    expected: str
    curve: Curve


def stored_runs() -> list[StoredRun]:
    """Return the curves of the file."""
    return [_stored(json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]


def _stored(found: dict[str, Any]) -> StoredRun:
    phases = {int(first): configured(found["steps"], found["seed"], keys) for first, keys in found["phases"].items()}
    last, count = found["steps"], len(found["train_losses"])
    steps = range(last - count + 1, last + 1)
    of_step = {step: phases[max(first for first in phases if first < step)] for step in steps}
    curve = Curve(
        steps=steps,
        train_losses=found["train_losses"],
        grad_norms=found["grad_norms"],
        learning_rates=[learning_rate(step, training) for step, training in of_step.items()],
        val=tuple((step, loss) for step, loss in found["val"]),
        vocab_size=VOCAB,
        total_steps=last,
        grad_clip=phases[0].grad_clip,
    )
    return StoredRun(name=found["name"], expected=found["expected"], curve=curve)


def _run(
    name: str,
    expected: str,
    seed: int,
    then: Phases | None = None,
    *,
    of_run: Mapping[str, Any] | None = None,
    **keys: Any,
) -> RealRun:
    return RealRun(
        name=f"{name}-{seed}", expected=expected, seed=seed, phases={0: keys, **(then or {})}, **(of_run or {})
    )


RESTART = {120: {"warmup_steps": 0, "steps": 480}}
FORK = {160: {"warmup_steps": 0, "steps": 400}}
BURST = {170: {"lr": 0.3, "warmup_steps": 0}, 172: {"grad_clip": 0.0}}
RUNS = (
    *(_run("plain", "healthy", seed) for seed in (1, 2, 3)),
    *(_run("fast", "healthy", seed, lr=1e-2) for seed in (1, 2)),
    *(_run("mixture", "healthy", seed, of_run={"source": "mixture"}) for seed in (1, 2, 3, 4)),
    _run("mixture-unclipped", "healthy", 1, of_run={"source": "mixture"}, grad_clip=0.0),
    *(_run("batch-of-one", "healthy", seed, global_batch=1, lr=1e-3) for seed in (1, 2)),
    _run("batch-of-two", "spiking", 1, global_batch=2, lr=2e-3),
    *(_run("wsd", "healthy", seed, schedule="wsd", min_lr=0.0) for seed in (1, 2)),
    *(_run("jump", "healthy", seed, of_run={"source": "jump"}) for seed in (1, 2, 3)),
    *(_run("restart", "healthy", seed, RESTART, steps=121) for seed in (1, 2)),
    _run("restart", "spiking", 3, RESTART, steps=121),
    *(
        _run("fork", "healthy", seed, FORK, steps=161, schedule="wsd", min_lr=0.0, of_run={"kept_from": 160})
        for seed in (1, 2)
    ),
    _run("muon", "healthy", 1, optimizer="muon", warmup_steps=0),
    _run("momentum", "healthy", 1, optimizer="momentum", lr=0.3),
    _run("unclipped", "healthy", 1, grad_clip=0.0),
    _run("wide", "healthy", 1, of_run={"width": 64}),
    *(_run("poisoned-unclipped", "spiking", seed, of_run={"noise_at": (161,)}, grad_clip=0.0) for seed in (1, 2, 3)),
    *(_run("poisoned", "spiking", seed, of_run={"noise_at": (161,)}) for seed in (1, 2)),
    _run("rate-burst", "spiking", 1, BURST, grad_clip=0.0),
    *(_run("diverging", "diverging", seed, steps=120, lr=1.0, min_lr=0.1, of_run={"steps": 36}) for seed in (1, 2)),
    _run("rate-raised", "diverging", 1, {150: {"lr": 0.5, "min_lr": 0.5, "warmup_steps": 0}}),
    *(_run("no-rate", "stuck", seed, lr=1e-12, min_lr=0.0) for seed in (1, 2)),
    *(_run("dead-rate", "plateau", seed, steps=80, min_lr=1e-9, of_run={"steps": 480}) for seed in (1, 2)),
    *(_run("clipped", "clipping", seed, grad_clip=0.05) for seed in (2, 3)),
    *(_run("reread", "overfitting", seed, of_run={"train_tokens": 600}) for seed in (1, 2)),
)


def main() -> None:
    """Train them all and write the file, a line a run."""
    torch.set_num_threads(1)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        for run in RUNS:
            file.write(json.dumps(run.train(), separators=(",", ":"), sort_keys=True) + "\n")
            print(run.name, len(run.records), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
