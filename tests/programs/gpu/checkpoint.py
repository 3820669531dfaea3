"""What a checkpoint costs: how long training stands still, when it is committed, and what resuming takes.

By the same hands as `make bench-checkpoint`: one process saves as the trainer does, beside a plain copy into locked
memory that is there; another, from nothing, reads it all back and takes a step.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable

import torch

from cairn.model.training.determinism import make_deterministic
from cairn.model.training.train_state import TrainState
from tests.programs.benchmarks import bench_checkpoint
from tests.programs.benchmarks.checkpoint_savers import SAVERS, Saved, Watch, state_bytes
from tests.programs.gpu.rows import say

TARGET_STALL_SECONDS, TIMES_A_COPY = 0.05, 1.2
"""What a state of 1.5 GB may cost, or more where a plain copy does."""


def main() -> None:
    """Save some times, then resume once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", choices=bench_checkpoint.SIZES, default="124M")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=8)
    given = parser.parse_args()
    given.threads = 1 if given.tiny else given.threads
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        given.store = f"file://{folder}"
        save(given)
        resume(given)


def save(given: argparse.Namespace) -> None:
    """Save as the trainer does and by a plain copy, in turns."""
    make_deterministic(seed=1, threads=given.threads)
    state = bench_checkpoint.fresh_state(given.parameters, given.device)
    size = state_bytes(state)
    savers = {"cairn": SAVERS["cairn"](state, given.store), "plain copy": locked_copy(state)}
    for turn in range(given.rounds + 1):
        saves = {name: saver() for name, saver in savers.items()}
        if turn:  # the first makes what the others use again
            for name, saved in saves.items():
                allowed = max(TARGET_STALL_SECONDS, TIMES_A_COPY * saves["plain copy"].stall_seconds)
                is_judged = name == "cairn" and given.parameters == "124M"
                passed = saved.stall_seconds <= allowed if is_judged else None
                _say_save(f"{given.parameters}, {name}, turn {turn}", size, saved, passed)


def locked_copy(state: TrainState) -> Callable[[], Saved]:
    """Return what copies every tensor into page-locked memory at hand: the least a stall can be."""
    live, locked = state.live_tensors(), state.device.type == "cuda"
    copies = [torch.empty(t.tensor.shape, dtype=t.tensor.dtype, pin_memory=locked).fill_(0) for t in live]

    def copy() -> Saved:
        watch = Watch()
        for to, named in zip(copies, live, strict=True):
            to.copy_(named.tensor, non_blocking=True)
        if locked:
            torch.cuda.synchronize(state.device)
        return watch.stopped().saved()

    return copy


def _say_save(name: str, size: int, saved: Saved, passed: bool | None) -> None:
    stall, safe = saved.stall_seconds, saved.safe_seconds
    rates = {"gb": size / 1e9, "copied_gb_per_s": size / stall / 1e9, "safe_mb_per_s": size / safe / 1e6}
    say(name, passed=passed, stall_ms=1e3 * stall, safe_s=safe, **rates)


def resume(given: argparse.Namespace) -> None:
    """Say what a new process needs until its first step is done."""
    seconds = []
    for _ in range(2):
        said = bench_checkpoint.turn(given, "resume", "cairn")
        seconds.append(said["first_step"])
        say(f"{given.parameters}, resumed", first_step_s=said["first_step"], state_in_place_s=said["loaded"])
    say(f"{given.parameters}, resumed, median", first_step_s=statistics.median(seconds))


if __name__ == "__main__":
    main()
