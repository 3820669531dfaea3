"""The training step beside nanoGPT's: `python -m tests.programs.benchmarks.bench_step --nanogpt DIR`.

Every contender trains the same network from the same weights on the same windows, in a process of its own; contenders
take turns, so that whatever else the machine does meets them all, and what is compared are the ratios of one round.
Seconds of a core say more than those of the clock where other work runs beside it. nanoGPT's step is that of its
train.py at commit 3adf61e (batch gathered by torch.stack, forward, backward, clipping, its own AdamW, loss.item());
its model.py is read from DIR, a checkout of github.com/karpathy/nanoGPT.
"""

import argparse
import importlib.util
import json
import math
import pydoc_data.topics
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig, auto_micro_batch
from cairn.model.data.batch_loader import BatchLoader
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.estimates.utilization import flops_per_token, measure_peak_flops
from cairn.model.training.determinism import make_deterministic
from cairn.model.training.gradient_sum import Workers
from cairn.model.training.parallel import SINGLE_RANK, Ranks
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_step import StepInputs, take_step
from tests.programs.benchmarks.own_process import answer_of

LEARNING_RATE, WARM_STEPS = 1e-3, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A network and its batch; the vocabulary is nanoGPT's for this recipe, in ids."""

    model: ModelConfig
    batch: int
    vocab_size: int


def recipe(layers: int, heads: int, width: int, block: int, batch: int, vocab_size: int) -> Recipe:
    """Put a recipe together as nanoGPT's command line does, without dropout."""
    shape = ModelConfig(n_layer=layers, n_head=heads, n_embd=width, block_size=block)
    return Recipe(model=shape, batch=batch, vocab_size=vocab_size)


RECIPES = {
    "small": recipe(4, 4, 128, 64, 12, 65),
    "shakespeare": recipe(6, 6, 384, 256, 64, 65),
    "gpt2": recipe(12, 12, 768, 1024, 4, 50304),
    "quickstart": Recipe(
        model=ModelConfig(architecture="qwen3", n_layer=4, n_head=4, n_embd=128, block_size=128, zero_projections=True),
        batch=32,
        vocab_size=1024,
    ),
}
OURS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32-fused": {"kernels": "fused"},
    "bf16": {"precision": "bf16"},
    "bf16-fused": {"precision": "bf16", "kernels": "fused"},
    "fp32-compiled": {"compile": True},
    "bf16-compiled": {"precision": "bf16", "compile": True},
    "fp32-portable": {"kernels": "fused", "arithmetic": "portable"},
    "fp32-muon": {"kernels": "fused", "optimizer": "muon"},
    "bf16-muon": {"precision": "bf16", "kernels": "fused", "optimizer": "muon"},
}
NANOGPT = "nanogpt"
NANOGPT_FIELDS = {"n_layer", "n_head", "n_embd", "block_size", "dropout", "bias"}
"""What its configuration shares with ours, beside the vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one contender did in one round: seconds of each step, the loss of the last, the largest resident set."""

    wall_seconds: float
    core_seconds: float
    loss: float
    peak_bytes: int


def main() -> None:
    """Be one contender, or set them all against each other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", type=Path, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--recipe", choices=RECIPES, default="small")
    parser.add_argument("--contenders", default="fp32,bf16,bf16-fused", help=f"of {', '.join(OURS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, help="windows in a step, where the recipe's are too many for the machine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0, help="for every contender; nanoGPT's shakespeare has 0.2")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender:
        print(json.dumps(asdict(take_turn(given))))
    else:
        report(given)


def text_tokens(vocab_size: int) -> np.ndarray:
    """Text every CPython carries as ids below `vocab_size`: characters, or pairs of them where there is room."""
    text = np.frombuffer("".join(pydoc_data.topics.topics.values()).encode(), dtype=np.uint8).astype(np.int64)
    ids = text if vocab_size < 2**15 else text[:-1] * 256 + text[1:]
    _, ranked = np.unique(ids, return_inverse=True)
    return (ranked % vocab_size).astype(np.uint16)


def take_turn(given: argparse.Namespace) -> Turn:
    """Train for some steps as `given.contender` and say what it took."""
    chosen = RECIPES[given.recipe]
    chosen = replace(chosen, model=chosen.model.model_copy(update={"dropout": given.dropout}))
    batch = given.batch or chosen.batch
    make = nanogpt_step if given.contender == NANOGPT else our_step
    torch.set_num_threads(given.threads)
    windows = TokenWindows([text_tokens(chosen.vocab_size)], chosen.model.block_size, chosen.vocab_size)
    step = make(given, chosen, windows, batch)
    losses = [step(number) for number in range(WARM_STEPS)]
    wall, core = time.perf_counter(), time.process_time()
    losses += [step(WARM_STEPS + number) for number in range(given.steps)]
    return Turn(
        wall_seconds=(time.perf_counter() - wall) / given.steps,
        core_seconds=(time.process_time() - core) / given.steps,
        loss=losses[-1],
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def order_of(windows: TokenWindows, batch: int) -> SampleOrder:
    """Return the order all contenders draw from."""
    return SampleOrder(window_count=windows.window_count, seed=1, global_batch=batch)


def our_step(
    given: argparse.Namespace,
    chosen: Recipe,
    windows: TokenWindows,
    batch: int,
    *,
    threads: int = 1,
    micro_batches: int | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> Callable[[int], float]:
    """Return a step as the trainer takes it, with a worker for each core that `threads` leaves; batches read ahead."""
    steps = WARM_STEPS + given.steps
    training = TrainingConfig(
        steps=steps,
        global_batch=batch,
        lr=LEARNING_RATE,
        min_lr=LEARNING_RATE,
        warmup_steps=0,
        **{"precision": "fp32", "kernels": "stock", **OURS[given.contender]},
    )
    make_deterministic(seed=1, threads=threads, arithmetic=training.arithmetic)
    state = TrainState.create(chosen.model, training, chosen.vocab_size, torch.device("cpu"), ranks)
    state.workers = Workers(max(1, given.threads // (threads * ranks.size)))
    order, micro_batch = order_of(windows, batch), auto_micro_batch(batch, chosen.model.block_size, on_cpu=True)
    micro_batch = micro_batch if micro_batches is None else math.ceil(batch / micro_batches)
    rows = ranks.rows(batch, micro_batch)
    loader = BatchLoader(windows, order, state.device, end_step=steps, rows=rows)
    inputs = StepInputs(windows=windows, order=order, training=training, micro_batch=micro_batch, loader=loader)
    return lambda _: take_step(state, inputs).loss


def nanogpt_model(folder: Path) -> Any:
    """Return the module of its networks, from a checkout."""
    specification = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def nanogpt_step(
    given: argparse.Namespace, chosen: Recipe, windows: TokenWindows, batch: int
) -> Callable[[int], float]:
    """Return the step of nanoGPT's train.py on its own model, which begins with our weights."""
    module = nanogpt_model(given.nanogpt)
    shape = {"vocab_size": chosen.vocab_size, **chosen.model.model_dump(include=NANOGPT_FIELDS)}
    theirs = module.GPT(module.GPTConfig(**shape))
    training = TrainingConfig(steps=1, lr=LEARNING_RATE, precision="fp32", kernels="stock")
    ours = TrainState.create(chosen.model, training, chosen.vocab_size, torch.device("cpu")).model.state_dict()
    theirs.load_state_dict({f"transformer.{name}": weight for name, weight in ours.items()}, strict=False)
    optimizer = theirs.configure_optimizers(0.1, LEARNING_RATE, (0.9, 0.95), "cpu")
    order, tokens = order_of(windows, batch), text_tokens(chosen.vocab_size)

    def get_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        begins, size = order.windows_of(number) * chosen.model.block_size, chosen.model.block_size
        x = torch.stack([torch.from_numpy(tokens[i : i + size].astype(np.int64)) for i in begins])
        y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + size].astype(np.int64)) for i in begins])
        return x, y

    waiting = [get_batch(0)]

    def step(number: int) -> float:
        _, loss = theirs(*waiting.pop())
        waiting.append(get_batch(number + 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step


def run_turn(given: argparse.Namespace, contender: str) -> Turn:
    """Let `contender` take its turn in a process of its own."""
    said = answer_of("tests.programs.benchmarks.bench_step", *sys.argv[1:], "--contender", contender)
    print(contender, said, file=sys.stderr)
    return Turn(**said)


def report(given: argparse.Namespace) -> None:
    """Run all rounds and print one line for each contender; ratios are medians over rounds, above 1 is faster."""
    names = [NANOGPT, *given.contenders.split(",")] if given.nanogpt else given.contenders.split(",")
    rounds: list[dict[str, Turn]] = []
    for number in range(given.rounds):
        rounds.append({name: run_turn(given, name) for name in names})
        print(f"round {number + 1} of {given.rounds}", file=sys.stderr)
    chosen = RECIPES[given.recipe]
    batch = given.batch or chosen.batch
    tokens, flops = batch * chosen.model.block_size, flops_of_step(chosen, batch)
    print("| | tokens/s | tokens/core-s | GFLOP/s | × by the clock | × by the core | loss | peak MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        turns = [each[name] for each in rounds]
        print(line(name, turns, [each[names[0]] for each in rounds], tokens, flops))
    torch.set_num_threads(given.threads)
    for precision in ("fp32", "bf16"):
        peak = measure_peak_flops(torch.device("cpu"), precision)
        print(f"matrix products, {precision}: {peak / 1e9:,.0f} GFLOP/s")


def flops_of_step(chosen: Recipe, batch: int) -> int:
    """Return the FLOPs of a forward and backward pass over so many windows."""
    return flops_per_token(chosen.model, vocab_size=chosen.vocab_size) * batch * chosen.model.block_size


def line(name: str, turns: list[Turn], first: list[Turn], tokens: int, flops: float) -> str:
    """Format what one contender did, beside the first one."""
    wall = statistics.median(turn.wall_seconds for turn in turns)
    core = statistics.median(turn.core_seconds for turn in turns)
    by_clock = statistics.median(a.wall_seconds / b.wall_seconds for a, b in zip(first, turns, strict=True))
    by_core = statistics.median(a.core_seconds / b.core_seconds for a, b in zip(first, turns, strict=True))
    return (
        f"| {name} | {tokens / wall:,.0f} | {tokens / core:,.0f} | {flops / wall / 1e9:,.0f} | {by_clock:.2f} "
        f"| {by_core:.2f} | {turns[-1].loss:.4f} | {max(turn.peak_bytes for turn in turns) / 2**20:,.0f} |"
    )


if __name__ == "__main__":
    main()
