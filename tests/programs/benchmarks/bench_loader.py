"""How fast batches are read beside how fast they are trained on: `python -m tests.programs.benchmarks.bench_loader`.

The loader alone, reading on the spot, and training of a configuration's model with either, in turns in one process, so
that whatever else the machine does meets them all; medians. `--device cuda` measures an accelerator, `--set` another
model or batch, and `--read-only` leaves the training out.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.batch_loader import BatchLoader, gather_batch
from cairn.model.data.sample_order import Component, SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.estimates.numerics import choose_numerics
from cairn.model.estimates.utilization import measure_machine
from cairn.model.training.determinism import make_deterministic, resolve_device
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_step import StepInputs, take_step
from cairn.tasks.configuration.configuration_source import load_configuration

QUICKSTART = Path(__file__).parents[3] / "deployments" / "quickstart.toml"
VOCAB, END_OF_TEXT = 1024, 0
SHARDS, SHARD_TOKENS = 4, 5_000_000
NEVER = 2**40


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is measured and on what."""

    model: ModelConfig
    training: TrainingConfig
    windows: TokenWindows
    device: torch.device

    @property
    def step_tokens(self) -> int:
        """Tokens trained on in one step."""
        return self.training.global_batch * self.model.block_size

    def order(self, sources: int = 1) -> SampleOrder:
        """Return the order over one or several sources of equal size and unequal weight."""
        size = self.windows.window_count // sources
        parts = tuple(
            Component(first_window=n * size, window_count=size, weight=n + 1.0)
            for n in range(sources if sources > 1 else 0)
        )
        return SampleOrder(
            window_count=self.windows.window_count, seed=1, global_batch=self.training.global_batch, components=parts
        )


def mapped_shards(folder: Path) -> list[np.ndarray]:
    """Write shards of random tokens with an end of text every 300 or so, and map them."""
    random = np.random.default_rng(0)
    for number in range(SHARDS):
        tokens = random.integers(1, VOCAB, SHARD_TOKENS).astype(np.uint16)
        tokens[random.integers(0, SHARD_TOKENS, SHARD_TOKENS // 300)] = END_OF_TEXT
        tokens.tofile(folder / f"{number}.bin")
    return [np.memmap(folder / f"{number}.bin", dtype=np.uint16, mode="r") for number in range(SHARDS)]


def reading(setting: Setting, *, sources: int, ahead: bool) -> Callable[[int], None]:
    """Return what reads so many batches and does nothing with them."""
    order = setting.order(sources)

    def read(steps: int) -> None:
        if not ahead:
            for step in range(steps):
                gather_batch(setting.windows, order.windows_of(step))
            return
        with closing(BatchLoader(setting.windows, order, setting.device, end_step=steps)) as loader:
            for step in range(steps):
                loader.batch(step)

    return read


def training(setting: Setting, *, ahead: bool, masked: bool = False) -> Callable[[int], None]:
    """Return what trains so many steps."""
    state = TrainState.create(setting.model, setting.training, VOCAB, setting.device)
    state.model.boundary_id = END_OF_TEXT if masked else None
    order = setting.order()
    inputs = StepInputs(
        windows=setting.windows,
        order=order,
        training=setting.training,
        micro_batch=setting.training.global_batch,
        loader=BatchLoader(setting.windows, order, setting.device, end_step=NEVER) if ahead else None,
    )

    def train(steps: int) -> None:
        for _ in range(steps):
            take_step(state, inputs)

    return train


def tokens_per_second(setting: Setting, work: Callable[[int], None], steps: int) -> float:
    """Time so many steps of the work."""
    started = time.perf_counter()
    work(steps)
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)
    return steps * setting.step_tokens / (time.perf_counter() - started)


def jobs_of(setting: Setting, *, train_steps: int, read_steps: int) -> dict[str, tuple[Callable[[int], None], int]]:
    """Return what is measured and for how many steps; no training for `train_steps` 0."""
    reads = {
        "loader alone, one source": reading(setting, sources=1, ahead=True),
        "loader alone, eight sources mixed": reading(setting, sources=8, ahead=True),
        "gathered on the spot, one source": reading(setting, sources=1, ahead=False),
    }
    jobs = {name: (work, read_steps) for name, work in reads.items()}
    if train_steps:
        jobs["training, read ahead"] = training(setting, ahead=True), train_steps
        jobs["training, gathered on the spot"] = training(setting, ahead=False), train_steps
        jobs["training with mask_documents, read ahead"] = training(setting, ahead=True, masked=True), train_steps
    return jobs


def measure(setting: Setting, *, rounds: int, train_steps: int, read_steps: int) -> dict[str, float]:
    """Return the median tokens per second of each kind of work, done in turns."""
    jobs = jobs_of(setting, train_steps=train_steps, read_steps=read_steps)
    for work, _ in jobs.values():
        work(3)
    found: dict[str, list[float]] = {name: [] for name in jobs}
    names = list(jobs)
    for turn in range(rounds):
        first = turn % len(names)  # whoever comes after the reads finds the caches cold: everybody once
        for name in [*names[first:], *names[:first]]:
            found[name].append(tokens_per_second(setting, *jobs[name]))
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Measure and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--config", type=Path, default=QUICKSTART)
    arguments.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments.add_argument("--read-only", action="store_true")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--train-steps", type=int, default=10)
    arguments.add_argument("--read-steps", type=int, default=300)
    arguments.add_argument("--threads", type=int, default=None)
    given = arguments.parse_args()
    config = load_configuration(given.config, overrides=given.set, environment={})
    make_deterministic(seed=1, threads=given.threads)
    trained = config.training.model_copy(update={"steps": NEVER, "warmup_steps": 0, "device": given.device})
    numerics = choose_numerics(trained, config.model, measure_machine())
    with tempfile.TemporaryDirectory() as folder:
        windows = TokenWindows(mapped_shards(Path(folder)), config.model.block_size, VOCAB)
        setting = Setting(
            model=config.model,
            training=trained.model_copy(update={"precision": numerics.precision, "kernels": numerics.kernels}),
            windows=windows,
            device=resolve_device(given.device),
        )
        train_steps = 0 if given.read_only else given.train_steps
        speeds = measure(setting, rounds=given.rounds, train_steps=train_steps, read_steps=given.read_steps)
    need = speeds.get("training, read ahead")
    print(f"torch {torch.__version__}, numpy {np.__version__}, {given.device}, {torch.get_num_threads()} threads")
    for name, speed in speeds.items():
        print(f"| {name} | {speed:,.0f} | {'' if need is None else f'{speed / need:.2f}'} |")


if __name__ == "__main__":
    main()
