"""What it costs to add gradients in one order: `python -m tests.programs.benchmarks.bench_sum`.

First, on one process, steps whose micro-batches are added along the tree take turns with steps in which autograd adds
each to the sum of those before. Then a step of the whole batch whose products share the cores takes turns with steps
whose micro-batches do: by workers, and by processes. What counts are the ratios of neighbours: other load meets all.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from cairn.model.data.token_windows import TokenWindows
from cairn.model.training import parallel
from cairn.model.training.parallel import SINGLE_RANK, Ranks, accumulate, join_ranks
from tests.programs.benchmarks.bench_step import OURS, RECIPES, WARM_STEPS, our_step, text_tokens

CPU = torch.device("cpu")
WAYS = ("threads", "workers", "processes")
"""How cores are used: in the products of the whole batch, or for a micro-batch each."""


def main() -> None:
    """Measure both, or be one of the processes of the second part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=RECIPES, default="small")
    parser.add_argument("--contender", choices=OURS, default="bf16-fused")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch", type=int, help="windows in a step, where the recipe's are not right for the machine")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.dropout = 0.0
    if given.rank is not None:
        print(json.dumps(train_rank(given)))
    else:
        compare_sums(given)
        compare_ways(given)


def plain_sum(parameters: Sequence[nn.Parameter], backwards: Iterable[Callable[[], None]]) -> None:
    """Let autograd add each micro-batch to the sum of those before it."""
    for backward in backwards:
        backward()


SUMS = {"added in turn": plain_sum, "along the tree": accumulate}


def make_step(
    given: argparse.Namespace, ranks: Ranks = SINGLE_RANK, *, threads: int = 1, micro_batches: int | None = None
) -> Callable[[int], float]:
    """Return the step that is measured."""
    chosen = RECIPES[given.recipe]
    windows = TokenWindows([text_tokens(chosen.vocab_size)], chosen.model.block_size, chosen.vocab_size)
    batch = given.batch or chosen.batch
    micro_batches = micro_batches or given.micro_batches
    return our_step(given, chosen, windows, batch, threads=threads, micro_batches=micro_batches, ranks=ranks)


def compare_sums(given: argparse.Namespace) -> None:
    """Take each step with both sums, which of them first in turns, and print medians and the median ratio."""
    steps = {name: make_step(given, threads=given.threads) for name in SUMS}
    wall: dict[str, list[float]] = {name: [] for name in SUMS}
    core: dict[str, list[float]] = {name: [] for name in SUMS}
    for number in range(WARM_STEPS + given.steps):
        for name in list(SUMS)[:: -1 if number % 2 else 1]:
            parallel.accumulate = SUMS[name]
            began, core_began = time.perf_counter(), time.process_time()
            steps[name](number)
            wall[name].append(time.perf_counter() - began)
            core[name].append(time.process_time() - core_began)
    parallel.accumulate = accumulate
    print(f"{given.recipe}, {given.contender}, {given.micro_batches} micro-batches, {given.threads} threads")
    print_ratios({name: (wall[name][WARM_STEPS:], core[name][WARM_STEPS:]) for name in SUMS})


def compare_ways(given: argparse.Namespace) -> None:
    """Let the ways of using all cores take turns of some steps each, and print medians and the median ratio."""
    turns: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in WAYS}
    for _ in range(given.rounds):
        for way, (wall, core) in turns.items():
            seconds = run_ranks(way, given.threads if way == "processes" else 1)
            wall.append(seconds[0])
            core.append(seconds[1])
    print_ratios(turns)


def run_ranks(way: str, size: int) -> tuple[float, float]:
    """Train in so many processes; return the seconds of a step by the clock, and of all cores."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [
        sys.executable,
        "-m",
        "tests.programs.benchmarks.bench_sum",
        *sys.argv[1:],
        "--way",
        way,
        "--size",
        str(size),
    ]
    ranks = [
        subprocess.Popen([*words, "--port", str(store.port), "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    said = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    return max(wall for wall, _ in said), sum(core for _, core in said)


def train_rank(given: argparse.Namespace) -> tuple[float, float]:
    """Be one rank: return the seconds of a step by the clock and of its own cores."""
    ranks = SINGLE_RANK
    if given.size > 1:
        store = dist.TCPStore("127.0.0.1", given.port, is_master=False)
        ranks = join_ranks(given.rank, given.size, mode="ddp", device=CPU, store=store)
    is_before = given.way == "threads"
    step = make_step(
        given, ranks, threads=given.threads if is_before else 1, micro_batches=1 if is_before else given.micro_batches
    )
    for number in range(WARM_STEPS):
        step(number)
    wall, core = time.perf_counter(), time.process_time()
    for number in range(given.steps):
        step(WARM_STEPS + number)
    return (time.perf_counter() - wall) / given.steps, (time.process_time() - core) / given.steps


def print_ratios(seconds: dict[str, tuple[list[float], list[float]]]) -> None:
    """Print a line for each, beside the first one; a ratio above 1 is slower."""
    (first_wall, first_core), *_ = seconds.values()
    print("| | ms by the clock | ms of a core | × by the clock | × by the core |\n|---|---|---|---|---|")
    for name, (wall, core) in seconds.items():
        by_clock = statistics.median(mine / first for mine, first in zip(wall, first_wall, strict=True))
        by_core = statistics.median(mine / first for mine, first in zip(core, first_core, strict=True))
        times = f"{statistics.median(wall) * 1e3:.1f} | {statistics.median(core) * 1e3:.1f}"
        print(f"| {name} | {times} | {by_clock:.3f} | {by_core:.3f} |", flush=True)


if __name__ == "__main__":
    main()
