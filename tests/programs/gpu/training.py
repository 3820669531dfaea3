"""The contenders of the GPU check: ways of our own to train a network, and nanoGPT's, each ready to take steps.

Imports torch, NumPy, pydantic, psutil and nothing that a bare PyTorch machine would lack.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.batch_loader import BatchLoader
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.training.determinism import make_deterministic, resolve_device
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_loop import (
    DEFERRED_STEPS,
    FETCH_EVERY_STEP,
    FetchSchedule,
    StepObserver,
    train_until,
)
from cairn.model.training.training_step import StepInputs
from tests.programs.benchmarks.bench_step import NANOGPT_FIELDS, nanogpt_model, text_tokens

NANOGPT, NANOGPT_COMPILED = "nanogpt", "nanogpt-compiled"
LEARNING_RATE = 6e-4
NEVER = 2**30
BOUNDARY = 0
"""An id that ends a document; it occurs in the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A way to train: configuration, when losses are read, whether batches are read ahead, whether order matters."""

    training: Mapping[str, Any] = field(default_factory=dict)
    fetches_every_step: bool = False
    reads_ahead: bool = True
    deterministic: bool = True


FUSED, COMPILED = {"precision": "bf16", "kernels": "fused"}, {"compile": True}
STOCK, MASKED = {"precision": "bf16", "kernels": "stock"}, {"mask_documents": True}
CONTENDERS: Mapping[str, Contender] = {
    "fp32": Contender(training={"precision": "fp32", "kernels": "stock"}),
    "fp32-fused": Contender(training={"precision": "fp32", "kernels": "fused"}),
    "fp16": Contender(training={"precision": "fp16", "kernels": "stock"}),
    "stock": Contender(training=STOCK),
    "fused": Contender(training=FUSED),
    "fused-compiled": Contender(training=FUSED | COMPILED),
    "stock-compiled": Contender(training=STOCK | COMPILED),
    "stock-masked": Contender(training=STOCK | MASKED),
    "fused-masked": Contender(training=FUSED | MASKED),
    "fused-muon": Contender(training=FUSED | {"optimizer": "muon"}),
    "fused-momentum": Contender(training=FUSED | {"optimizer": "momentum"}),
    "fused-recomputed": Contender(training=FUSED | {"activation_checkpointing": True}),
    "fused-fetch-every-step": Contender(training=FUSED, fetches_every_step=True),
    "fused-not-read-ahead": Contender(training=FUSED, reads_ahead=False),
    "fused-any-order": Contender(training=FUSED, deterministic=False),
    "fused-compiled-any-order": Contender(training=FUSED | COMPILED, deterministic=False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A network and its vocabulary in ids; nanoGPT pads its own, `padded` to."""

    model: ModelConfig
    vocab_size: int
    padded: int


RECIPES = {
    "tiny": (2, 2, 32, 32, 211, 256),
    "gpt2": (12, 12, 768, 1024, 50257, 50304),
    "gpt2-medium": (24, 16, 1024, 1024, 50257, 50304),
    "gpt2-xl": (48, 25, 1600, 1024, 50257, 50304),
}


def recipe_of(name: str, dropout: float = 0.0) -> Recipe:
    """Return the recipe of this name; without biases, as nanoGPT trains it."""
    layers, heads, width, block, vocab_size, padded = RECIPES[name]
    shape = ModelConfig(n_layer=layers, n_head=heads, n_embd=width, block_size=block, dropout=dropout, bias=False)
    return Recipe(model=shape, vocab_size=vocab_size, padded=padded)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Who trains what where; `batch` in windows."""

    contender: str
    recipe: str
    device: str
    batch: int
    nanogpt: Path | None = None


class Training:
    """A run of our own on text every CPython carries."""

    def __init__(self, task: Task, *, dropout: float = 0.0) -> None:
        """Make the state of step 0."""
        chosen, self.contender = recipe_of(task.recipe, dropout), CONTENDERS[task.contender]
        make_deterministic(seed=1, threads=None)
        if not self.contender.deterministic:
            torch.use_deterministic_algorithms(False)
        self.training = TrainingConfig(
            steps=NEVER,
            global_batch=task.batch,
            lr=LEARNING_RATE,
            min_lr=LEARNING_RATE,
            warmup_steps=0,
            **self.contender.training,
        )
        self.state = TrainState.create(chosen.model, self.training, chosen.vocab_size, resolve_device(task.device))
        self.state.model.boundary_id = BOUNDARY if self.training.mask_documents else None
        self.windows = TokenWindows([text_tokens(chosen.vocab_size)], chosen.model.block_size, chosen.vocab_size)
        self.order = SampleOrder(window_count=self.windows.window_count, seed=1, global_batch=task.batch)
        self.loader = BatchLoader(self.windows, self.order, self.state.device, end_step=NEVER)
        self.losses: list[float] = []

    def train(self, steps: int, schedule: FetchSchedule | None = None) -> None:
        """Take so many steps more; every loss is read when it returns."""
        deferred = FetchSchedule(every_steps=DEFERRED_STEPS, every_seconds=3600.0)
        inputs = StepInputs(
            windows=self.windows,
            order=self.order,
            training=self.training,
            micro_batch=self.training.global_batch,
            loader=self.loader if self.contender.reads_ahead else None,
        )
        observer = StepObserver(
            on_step=lambda record: self.losses.append(record.train_loss), stop_requested=lambda: False
        )
        schedule = schedule or (FETCH_EVERY_STEP if self.contender.fetches_every_step else deferred)
        train_until(self.state, inputs, observer, until_step=self.state.step + steps, schedule=schedule)

    def digest(self) -> str:
        """Return a hash over every tensor of the state."""
        found = hashlib.sha256()
        for named in self.state.named_tensors():
            found.update(named.name.encode())
            found.update(named.tensor.numpy().tobytes())
        return found.hexdigest()


def nanogpt_training(task: Task) -> tuple[Callable[[int], None], list[float]]:
    """Return what takes steps as nanoGPT's train.py does on one accelerator, its model.py read from `task.nanogpt`.

    bf16 autocast, TF32 where it applies, fused AdamW, batches pinned and fetched behind the forward pass, loss read
    every ten steps as in config/train_gpt2.py; and its table of 50,304 rows.
    """
    assert task.nanogpt is not None
    module = nanogpt_model(task.nanogpt)
    chosen, device, losses = recipe_of(task.recipe), resolve_device(task.device), list[float]()
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    shape = chosen.model.model_dump(include=NANOGPT_FIELDS)
    theirs = module.GPT(module.GPTConfig(vocab_size=chosen.padded, **shape)).to(device)
    optimizer = theirs.configure_optimizers(0.1, LEARNING_RATE, (0.9, 0.95), device.type)
    network = torch.compile(theirs) if task.contender == NANOGPT_COMPILED else theirs
    data = torch.from_numpy(text_tokens(chosen.vocab_size).astype("int64"))
    size, autocast = chosen.model.block_size, torch.autocast(device.type, dtype=torch.bfloat16)

    def get_batch() -> tuple[torch.Tensor, ...]:
        begins = torch.randint(len(data) - size, (task.batch,)).tolist()
        pair = (torch.stack([data[i + shift : i + shift + size] for i in begins]) for shift in (0, 1))
        if device.type == "cuda":
            return tuple(part.pin_memory().to(device, non_blocking=True) for part in pair)
        return tuple(pair)

    waiting = [get_batch()]

    def train(steps: int) -> None:
        for number in range(steps):
            with autocast if device.type == "cuda" else nullcontext():
                _, loss = network(*waiting.pop())
            waiting.append(get_batch())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if number % 10 == 0 or number == steps - 1:
                losses.append(float(loss.item()))

    return train, losses
