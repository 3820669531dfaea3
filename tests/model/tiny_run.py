"""A tiny run for the model tests."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.training.parallel import SINGLE_RANK, Ranks
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_loop import FetchSchedule, StepObserver, StepResult, train_until
from cairn.model.training.training_step import StepInputs

VOCAB = 61
CPU = torch.device("cpu")


class TinyRun:
    """A run of a two-layer model on random tokens that can be trained, captured and continued."""

    def __init__(
        self,
        *,
        model: dict[str, Any] | None = None,
        device: torch.device = CPU,
        ranks: Ranks = SINGLE_RANK,
        has_answers: bool = False,
        files: dict[str, bytes] | None = None,
        **training: Any,
    ) -> None:
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, **(model or {})}
        self.model_config = ModelConfig.model_validate(sizes)
        exact = {"precision": "fp32", "kernels": "stock"}
        self.training = TrainingConfig(**{"steps": 12, "global_batch": 6, "warmup_steps": 2, **exact, **training})
        tokens = np.random.default_rng(5).integers(0, VOCAB, 401).astype(np.uint16)
        # Of answers, in stretches of four to ten tokens: some windows have none, some nothing else.
        self.answers = np.repeat(np.arange(60) % 3 == 1, np.arange(60) % 7 + 4)[: len(tokens)]
        masks = [self.answers[:100], self.answers[100:]] if has_answers else []
        self.windows = TokenWindows([tokens[:150], tokens[150:]], self.model_config.block_size, VOCAB, masks)
        self.order = SampleOrder(
            window_count=self.windows.window_count, seed=3, global_batch=self.training.global_batch
        )
        self.state = TrainState.create(self.model_config, self.training, VOCAB, device, ranks, files=files)

    def train(
        self,
        until_step: int,
        *,
        probe: Any = None,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
        schedule: FetchSchedule | None = None,
        watched: Callable[[StepResult], object] = id,
        **changes: Any,
    ) -> list[StepResult]:
        """Train on and return the records, which are in `records` also where it fails."""
        self.records: list[StepResult] = []

        def on_step(record: StepResult) -> None:
            self.records.append(record)
            watched(record)

        observer = StepObserver(on_step=on_step, stop_requested=stop, probe=probe, clock=clock)
        inputs = self.inputs(**changes)
        self.stopped = train_until(self.state, inputs, observer, until_step=until_step, schedule=schedule)
        return self.records

    def inputs(self, **changes: Any) -> StepInputs:
        """Return what its steps read, with `changes`."""
        wanted, batch = self.training.micro_batch, self.training.global_batch
        own = {"windows": self.windows, "order": self.order, "training": self.training}
        return StepInputs(**{**own, "micro_batch": batch if wanted == "auto" else wanted, **changes})

    def bits(self) -> dict[str, bytes]:
        """Return every tensor of the state as bytes."""
        return {named.name: named.tensor.numpy().tobytes() for named in self.state.named_tensors()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the captured state."""
        return {named.name: named.tensor for named in self.state.named_tensors()}
