"""Training time to nanoGPT's loss: its own command, networks of ours, and counting, on one split and the same cores.

`python -m tests.programs.benchmarks.bench_time_to_loss --nanogpt DIR --text tinyshakespeare.txt`

nanoGPT's train.py runs as its README says for a CPU, from DIR, a checkout of github.com/karpathy/nanoGPT, and once more
384 wide, with a batch and a number of iterations that two cores can do; ours are real `cairn train`s. All take turns,
seed after seed. Training is the time of the steps, without starts, evaluations and checkpoints; the whole command is
all of its processes from start to end, preparing the text included. The loss is measured on all windows of the last
tenth of the text, by one function. Tables without any layer and a Kneser-Ney model (Chen and Goodman 1999, "An
Empirical Study of Smoothing Techniques for Language Modeling") show how far counting the same characters goes.
"""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import cairn
from cairn.model.architectures.gpt import GPT
from cairn.model.configuration.data import NOTHING_BEFORE
from cairn.model.configuration.network import ModelConfig
from cairn.model.data.batch_loader import BatchLoader
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.inference.prediction import held_out_loss
from cairn.model.training.determinism import make_deterministic
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_step import StepInputs, take_step
from cairn.reports.queries.run_lookup import configuration_of
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.data.snapshot_lookup import order_samples
from tests.programs.benchmarks.own_process import ROOT, set_options

EVERY = ("--device=cpu", "--compile=False", "--log_interval=1")
_TIME = re.compile(r"^iter (\d+): loss [\d.]+, time ([\d.]+)ms", re.MULTILINE)
Windows = NDArray[np.int64]
"""Rows of character ids (N, T + 1): T are asked, each after those before it in its row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What is asked of nanoGPT, its iterations, its batch, and the windows of everybody's held-out loss."""

    asked: tuple[str, ...]
    steps: int
    batch: int
    block_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A configuration of ours, and what else `--set` says."""

    config: str
    settings: tuple[str, ...] = ()


README_CPU = Recipe(
    asked=(
        *("--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0"),
        "--eval_iters=20",
    ),
    steps=2000,
    batch=12,
    block_size=64,
)
WIDE = Recipe(
    asked=("--batch_size=12", "--warmup_iters=5", "--eval_iters=1"),
    steps=50,
    batch=12,
    block_size=256,
)
"""Their network 384 wide: a step of its 64 windows of 256 takes 16 s; the warm-up is shortened as the run is."""
TWO_LAYERS, OURS_WIDE = Network(config="fast-shakespeare"), Network(config="wide-shakespeare")
TABLES = Network(
    config="fast-shakespeare",
    settings=(
        *("model.n_layer=1", "model.n_head=2", "model.n_embd=64", "model.ngram_rows=[3499, 3499, 3999]"),
        *("model.norm_gain=false", 'model.feed_forward="relu2"', "model.zero_projections=true"),
        *("training.steps=120", "training.global_batch=24", "training.momentum=0.95", "training.decay_fraction=0.6"),
        "checkpoint.every_steps=120",
    ),
)
"""770,000 parameters; primes, so that a table's rows are used alike."""
ORDER, VOCABULARY = 4, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Seconds of training and of the whole command, characters trained on, held-out loss in nats per character."""

    seconds: float
    whole_seconds: float = math.nan
    characters: int
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A finished run of ours: its configuration, last network, seconds of each step, and its data."""

    config: RunConfig
    network: GPT
    seconds: Sequence[float]
    windows: TokenWindows
    order: SampleOrder
    held_out: NDArray[np.uint16]

    @property
    def seen(self) -> Windows:
        """The windows of all steps."""
        return self.windows.gather(self.order.windows_between(0, len(self.seconds)).ravel())


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """How often each character follows each context of one length, and Ney's discount of these numbers."""

    followers: Mapping[str, Mapping[str, int]]
    discount: float


def main() -> None:
    """Take turns, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--text", type=Path, required=True, help="tiny Shakespeare, in one file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1338, 1339])
    parser.add_argument("--without-wide", action="store_true", help="leave the networks 384 wide out")
    given = parser.parse_args()
    results: dict[str, list[Result]] = defaultdict(list)
    for seed in given.seeds:
        with tempfile.TemporaryDirectory(prefix="cairn-bench-") as scratch:
            for name, result in take_turns(given, Path(scratch), seed):
                results[name].append(result)
                print(f"seed {seed}: {name} {result}", file=sys.stderr, flush=True)
    report(given.seeds, results)


def take_turns(given: argparse.Namespace, folder: Path, seed: int) -> Iterable[tuple[str, Result]]:
    """Yield every contender's name and result; those with "384 wide" are compared with nanoGPT's of this width."""
    yield NANOGPT, train_nanogpt(given, README_CPU, folder / "nanogpt", seed)
    yield "two layers", train_ours(given, TWO_LAYERS, README_CPU, folder / "two", seed)[0]
    result, tables = train_ours(given, TABLES, README_CPU, folder / "tables", seed)
    yield "tables, one layer", result
    yield "tables, no layer", train_without_layers(tables)
    yield f"Kneser-Ney, {ORDER}-grams", count_characters(tables.seen, tables.held_out, README_CPU.block_size)
    if not given.without_wide:
        yield NANOGPT_WIDE, train_nanogpt(given, WIDE, folder / "nanogpt-wide", seed)
        yield "384 wide", train_ours(given, OURS_WIDE, WIDE, folder / "wide", seed)[0]


NANOGPT, NANOGPT_WIDE = "nanoGPT", "nanoGPT, 384 wide"


def train_nanogpt(given: argparse.Namespace, recipe: Recipe, folder: Path, seed: int) -> Result:
    """Run nanoGPT's own commands in a copy of its checkout and measure its last weights."""
    shutil.copytree(given.nanogpt, folder, ignore=shutil.ignore_patterns(".git"))
    data = folder / "data" / "shakespeare_char"
    shutil.copy(given.text, data / "input.txt")
    (data / "requests.py").touch()  # prepare.py imports it to download what is there already
    program = (folder / "train.py").read_text()
    (folder / "train.py").write_text(program.replace("torch.manual_seed(1337", f"torch.manual_seed({seed}"))
    steps = recipe.steps
    asked = (f"--max_iters={steps}", f"--lr_decay_iters={steps}", f"--eval_interval={steps}")
    command = ["config/train_shakespeare_char.py", *EVERY, *recipe.asked, *asked, "--always_save_checkpoint=True"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    began = time.perf_counter()
    subprocess.run([sys.executable, data / "prepare.py"], check=True, stdout=subprocess.DEVNULL)
    done = subprocess.run(
        [sys.executable, "train.py", *command], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    whole = time.perf_counter() - began
    times = {int(number): float(milliseconds) for number, milliseconds in _TIME.findall(done.stdout)}
    times[0] = statistics.median(times.values())  # an evaluation was in it
    return Result(
        seconds=sum(times[number] for number in range(steps)) / 1e3,
        whole_seconds=whole,
        characters=steps * recipe.batch * recipe.block_size,
        loss=loss_of(load_nanogpt(folder), np.fromfile(data / "val.bin", dtype=np.uint16), recipe.block_size),
    )


def load_nanogpt(folder: Path) -> GPT:
    """Return its last network as one of ours, which computes the same."""
    saved = torch.load(folder / "out-shakespeare-char" / "ckpt.pt", weights_only=True)
    named = ("n_layer", "n_head", "n_embd", "block_size", "bias")
    network = GPT(ModelConfig(**{name: saved["model_args"][name] for name in named}), saved["model_args"]["vocab_size"])
    weights = {name.removeprefix("transformer."): value for name, value in saved["model"].items()}
    weights.pop("lm_head.weight")
    network.load_state_dict(weights)
    return network


def train_ours(
    given: argparse.Namespace, asked: Network, recipe: Recipe, store: Path, seed: int
) -> tuple[Result, Trained]:
    """Run `cairn train` and measure its last checkpoint."""
    config, run_id = ROOT / "deployments" / f"{asked.config}.toml", "bench"
    settings = [f"data.sources={json.dumps([str(given.text.resolve())])}", f"training.seed={seed}", *asked.settings]
    words = ["train", str(config), "--run-id", run_id, *set_options(settings), "--store", str(store)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    command = [sys.executable, "-m", "cairn.cli.command", *words]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    whole, trained = time.perf_counter() - began, open_trained(store, run_id, given.text)
    result = Result(
        seconds=sum(trained.seconds),
        whole_seconds=whole,
        characters=trained.seen[:, 1:].size,
        loss=loss_of(trained.network, trained.held_out, recipe.block_size),
    )
    return result, trained


def open_trained(store: Path, run_id: str, text: Path) -> Trained:
    """Open a finished run and its data."""
    run = cairn.open(str(store)).run(run_id)
    opened, config = run.open_checkpoint(), configuration_of(run.log.state)
    manifest, block_size = opened.snapshot.manifest, config.model.block_size
    characters = text.read_text(encoding="utf-8")
    ids = opened.tokenizer.encode_batch([characters[int(len(characters) * 0.9) :]])[0]
    return Trained(
        config=config,
        network=opened.network,
        seconds=run.curve["seconds"].to_pylist(),
        windows=TokenWindows(opened.snapshot.train, block_size, manifest.vocab_size),
        order=order_samples(manifest, config.data, config.training, block_size, before=NOTHING_BEFORE),
        held_out=np.array(ids, dtype=np.uint16),
    )


def train_without_layers(run: Trained) -> Result:
    """Train what a run's network is before and after its layers, as the run was trained; `cairn train` refuses it."""
    training, order = run.config.training, run.order
    threads = training.threads if isinstance(training.threads, int) else len(os.sched_getaffinity(0))
    make_deterministic(seed=training.seed, threads=threads)
    model = run.config.model.model_copy(update={"n_layer": 0})
    state = TrainState.create(model, training, run.windows.vocab_size, torch.device("cpu"))
    rows = slice(0, training.global_batch)
    loader = BatchLoader(run.windows, order, state.device, end_step=training.steps, rows=rows)
    inputs = StepInputs(
        windows=run.windows, order=order, training=training, micro_batch=training.global_batch, loader=loader
    )
    began = time.perf_counter()
    for _ in range(training.steps):
        take_step(state, inputs)
    seconds = time.perf_counter() - began
    loss = loss_of(state.model, run.held_out, model.block_size)
    return Result(seconds=seconds, characters=run.seen[:, 1:].size, loss=loss)


def loss_of(network: GPT, held_out: NDArray[np.uint16], block_size: int) -> float:
    """Return the mean loss over all windows of the held-out characters, of the same length for every network."""
    windows = TokenWindows([held_out], block_size, network.vocab_size)
    loss, _ = held_out_loss(network.eval(), windows, batches=windows.window_count, batch_size=1)
    return loss


def count_characters(seen: Windows, held_out: NDArray[np.uint16], block_size: int) -> Result:
    """Count n-grams of the characters that a network was trained on; the loss is on the windows of the networks'."""
    rows = ["".join(map(chr, row)) for row in seen.tolist()]
    began = time.perf_counter()
    levels = count_levels(rows)
    seconds = time.perf_counter() - began
    windows = TokenWindows([held_out], block_size, VOCABULARY)
    asked = ["".join(map(chr, row)) for row in windows.gather(np.arange(windows.window_count)).tolist()]
    losses = [-math.log(probability(levels, row[:at], row[at])) for row in asked for at in range(1, len(row))]
    return Result(seconds=seconds, characters=seen[:, 1:].size, loss=statistics.fmean(losses))


def count_levels(rows: Sequence[str]) -> list[Level]:
    """Return the levels of an interpolated Kneser-Ney model, that of the shortest context, which is empty, first."""
    grams: Mapping[str, int] = Counter(row[at : at + ORDER] for row in rows for at in range(len(row) - ORDER + 1))
    levels = []
    while "" not in grams:
        followers: dict[str, dict[str, int]] = defaultdict(dict)
        for gram, number in grams.items():
            followers[gram[:-1]][gram[-1]] = number
        numbers = Counter(grams.values())
        levels.append(Level(followers=followers, discount=numbers[1] / (numbers[1] + 2 * numbers[2])))
        grams = Counter(gram[1:] for gram in grams)  # in a shorter context counts before how many characters it stands
    return levels[::-1]


def probability(levels: Sequence[Level], before: str, character: str) -> float:
    """Return the probability of the character after those before it, of which it takes as many as it knows."""
    found = 1 / VOCABULARY
    for level, begin in zip(levels, range(len(before), -1, -1), strict=False):
        followers = level.followers.get(before[begin:])
        if followers is None:
            break
        spared = level.discount * len(followers) * found
        found = (max(0.0, followers.get(character, 0) - level.discount) + spared) / sum(followers.values())
    return found


def report(seeds: Sequence[int], results: Mapping[str, Sequence[Result]]) -> None:
    """Print a row for each contender, its seeds side by side, and the medians of its ratios to nanoGPT's."""
    print(f"seeds {', '.join(map(str, seeds))}; load {os.getloadavg()[0]:.1f}\n")
    print("| | characters | training, s | loss | of nanoGPT's | whole command, s | of nanoGPT's |")
    print("|---" * 7 + "|")
    for name, found in results.items():
        theirs = results[NANOGPT_WIDE if "384" in name else NANOGPT]
        pairs = list(zip(found, theirs, strict=True))
        training = statistics.median(our.seconds / their.seconds for our, their in pairs)
        whole = statistics.median(our.whole_seconds / their.whole_seconds for our, their in pairs)
        cells = (
            f"{found[0].characters:,}",
            ", ".join(f"{result.seconds:.2f}" for result in found),
            ", ".join(f"{our.loss:.3f}{'' if our.loss <= their.loss else ' (above)'}" for our, their in pairs),
            f"{training:.3f}",
            ", ".join(f"{result.whole_seconds:.1f}" for result in found),
            f"{whole:.2f}",
        )
        print(f"| {name} | {' | '.join(cells).replace('nan', '–')} |")


if __name__ == "__main__":
    main()
