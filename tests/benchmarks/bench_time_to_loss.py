"""Training time to nanoGPT's loss: its own command beside a recipe of ours, on the same split and the same cores.

`python -m tests.benchmarks.bench_time_to_loss --nanogpt DIR --text tinyshakespeare.txt`

nanoGPT's train.py runs as its README says for a CPU, from DIR, a checkout of github.com/karpathy/nanoGPT; ours is a
real `cairn train`, whose whole run `cairn replay` then trains again to the same digests. They take turns, seed after
seed. Time is that of the training steps, without starts, evaluations and checkpoints; the loss is measured on the
same windows of the last tenth of the text, all of them, by one function. `--recipe wide` takes nanoGPT's network 384
wide instead, with a batch and a number of iterations that two cores can do.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import cairn
from cairn.model.architectures.gpt import GPT
from cairn.model.configuration.network import ModelConfig
from cairn.model.data.token_windows import TokenWindows
from cairn.model.inference.prediction import held_out_loss

ROOT = Path(__file__).parents[2]
EVERY = ("--device=cpu", "--compile=False", "--log_interval=1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What is asked of nanoGPT, its iterations, the windows of the held-out loss, and our configuration beside it."""

    asked: tuple[str, ...]
    steps: int
    block_size: int
    config: Path


README_CPU = Recipe(
    asked=(
        *("--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0"),
        "--eval_iters=20",
    ),
    steps=2000,
    block_size=64,
    config=ROOT / "deployments" / "fast-shakespeare.toml",
)
WIDE = Recipe(
    asked=("--batch_size=12", "--warmup_iters=5", "--eval_iters=1"),
    steps=50,
    block_size=256,
    config=ROOT / "deployments" / "wide-shakespeare.toml",
)
RECIPES = {"cpu": README_CPU, "wide": WIDE}
"""Their README's command for a CPU, and their network 384 wide, shortened to what two cores can do.

A step of 64 windows of 256 takes these 16 s; the warm-up is shortened as the run is.
"""
_TIME = re.compile(r"^iter (\d+): loss [\d.]+, time ([\d.]+)ms", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One training: seconds of its steps, and the held-out loss of its last weights, in nats per character."""

    seconds: float
    steps: int
    loss: float


def main() -> None:
    """Take turns, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--text", type=Path, required=True, help="tiny Shakespeare, in one file")
    parser.add_argument("--recipe", choices=RECIPES, default="cpu", help="theirs, and ours beside it")
    parser.add_argument("--config", type=Path, help="another one of ours")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1338, 1339])
    parser.add_argument("--store", type=Path, help="where our runs are kept; else they go with the benchmark")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    given.config = given.config or RECIPES[given.recipe].config
    with tempfile.TemporaryDirectory(prefix="cairn-bench-") as scratch:
        folder = Path(scratch)
        theirs, ours = [], []
        for seed in given.seeds:
            theirs.append(train_nanogpt(given, folder / f"nanogpt-{seed}", seed))
            print(f"seed {seed}: nanoGPT {theirs[-1]}", file=sys.stderr, flush=True)
            ours.append(train_ours(given, given.store or folder / "store", seed))
            print(f"seed {seed}: ours {ours[-1]}", file=sys.stderr, flush=True)
    report(given.seeds, theirs, ours)


def train_nanogpt(given: argparse.Namespace, folder: Path, seed: int) -> Result:
    """Run nanoGPT's own command in a copy of its checkout and measure its last weights."""
    shutil.copytree(given.nanogpt, folder, ignore=shutil.ignore_patterns(".git"))
    data = folder / "data" / "shakespeare_char"
    shutil.copy(given.text, data / "input.txt")
    (data / "requests.py").touch()  # prepare.py imports it to download what is there already
    subprocess.run([sys.executable, data / "prepare.py"], check=True, stdout=subprocess.DEVNULL)
    program = (folder / "train.py").read_text()
    (folder / "train.py").write_text(program.replace("torch.manual_seed(1337", f"torch.manual_seed({seed}"))
    recipe = RECIPES[given.recipe]
    steps = recipe.steps
    asked = (f"--max_iters={steps}", f"--lr_decay_iters={steps}", f"--eval_interval={steps}")
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *EVERY, *recipe.asked, *asked]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--always_save_checkpoint=True"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    times = {int(number): float(milliseconds) for number, milliseconds in _TIME.findall(done.stdout)}
    times[0] = statistics.median(times.values())  # an evaluation was in it
    seconds = sum(times[number] for number in range(steps)) / 1e3
    saved = torch.load(folder / "out-shakespeare-char" / "ckpt.pt", weights_only=True)
    named = ("n_layer", "n_head", "n_embd", "block_size", "bias")
    network = GPT(ModelConfig(**{name: saved["model_args"][name] for name in named}), saved["model_args"]["vocab_size"])
    weights = {name.removeprefix("transformer."): value for name, value in saved["model"].items()}
    weights.pop("lm_head.weight")
    network.load_state_dict(weights)
    held_out = np.fromfile(data / "val.bin", dtype=np.uint16)
    return Result(seconds=seconds, steps=steps, loss=loss_of(network, held_out, recipe.block_size))


def train_ours(given: argparse.Namespace, store: Path, seed: int) -> Result:
    """Run `cairn train`, replay all of it, and measure its last checkpoint."""
    run_id, program = f"{given.config.stem}-{seed}", [sys.executable, "-m", "cairn.cli.command"]
    settings = [f"data.sources={json.dumps([str(given.text.resolve())])}", f"training.seed={seed}", *given.set]
    options = [part for setting in settings for part in ("--set", setting)]
    for command in (["train", str(given.config), "--run-id", run_id, *options], ["replay", run_id]):
        subprocess.run(
            [*program, *command, "--store", str(store)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    run = cairn.open(str(store)).run(run_id)
    opened, curve = run.open_checkpoint(), run.curve
    text = given.text.read_text(encoding="utf-8")
    ids = opened.tokenizer.encode_batch([text[int(len(text) * 0.9) :]])[0]
    seconds = sum(curve["seconds"].to_pylist())
    loss = loss_of(opened.network, np.array(ids, dtype=np.uint16), RECIPES[given.recipe].block_size)
    return Result(seconds=seconds, steps=len(curve), loss=loss)


def loss_of(network: GPT, held_out: np.ndarray, block_size: int) -> float:
    """Return the mean loss over all windows of the held-out characters, of the same length for both networks."""
    windows = TokenWindows([held_out], block_size, network.vocab_size)
    loss, _ = held_out_loss(network.eval(), windows, batches=windows.window_count, batch_size=1)
    return loss


def report(seeds: Sequence[int], theirs: Sequence[Result], ours: Sequence[Result]) -> None:
    """Print each pair, and the median of the ratios."""
    print("| seed | nanoGPT: steps | s | loss | ours: steps | s | loss | time, of nanoGPT's | loss reached |")
    print("|---" * 9 + "|")
    for seed, their, our in zip(seeds, theirs, ours, strict=True):
        print(
            f"| {seed} | {their.steps} | {their.seconds:.1f} | {their.loss:.3f} | {our.steps} | {our.seconds:.2f} "
            f"| {our.loss:.3f} | {our.seconds / their.seconds:.3f} | {'yes' if our.loss <= their.loss else 'NO'} |"
        )
    ratios = [our.seconds / their.seconds for their, our in zip(theirs, ours, strict=True)]
    print(f"\nmedian {statistics.median(ratios):.3f} of nanoGPT's training time, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
