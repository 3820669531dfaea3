"""How fast a contender trains: a row for each batch size, larger and larger ones until memory or time is too small.

Tokens a second, utilization against the measured peak of large products and against the data sheet, peak memory, and
where the device's time goes, from a profile of some steps of their own.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from cairn.model.estimates.utilization import (
    flops_per_token,
    measure_peak_flops,
    peak_flops_of_device,
    read_memory_bytes,
)
from cairn.model.training.determinism import resolve_device
from tests.programs.gpu.rows import say, time_limit
from tests.programs.gpu.training import (
    CONTENDERS,
    NANOGPT,
    NANOGPT_COMPILED,
    RECIPES,
    Task,
    Training,
    nanogpt_training,
    recipe_of,
)

WARM_STEPS, PROFILED_STEPS = 5, 3
STARTING_SECONDS, LONGER = 12.0, 1.8
"""Of the process before its first line here; times as long for twice the batch, compiled anew in the same time."""
PHASES = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "::mm", "addmm", "bmm", "linear"),
    "loss": ("softmax", "nll", "cross_entropy"),
    "norms": ("layer_norm", "layernorm", "norm"),
    "copies": ("memcpy", "memset", "copy", "cat"),
}
"""Words in a kernel's name by which its time is assigned; the first phase that fits has it."""


def main() -> None:
    """Train at every batch size that there is room for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contender", choices=[*CONTENDERS, NANOGPT, NANOGPT_COMPILED], required=True)
    parser.add_argument("--recipe", choices=RECIPES, default="gpt2")
    parser.add_argument("--batches", default="16,32,64")
    parser.add_argument("--segments", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="in each segment; the median counts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--nanogpt", type=Path)
    given = parser.parse_args()
    if given.tiny:
        given.steps = 2
    begun, last = time.monotonic(), 0.0
    peak = measure_peak_flops(resolve_device(given.device), "bf16")
    for batch in map(int, given.batches.split(",")):
        turn_begun = time.monotonic()
        if not has_time(turn_begun - begun, last, time_limit()):
            say(f"batch {batch}", said="not begun: its time is over")
            return
        task = Task(
            contender=given.contender, recipe=given.recipe, device=given.device, batch=batch, nanogpt=given.nanogpt
        )
        try:
            take_turn(task, given.segments, given.steps, peak)
        except torch.OutOfMemoryError as error:
            say(f"batch {batch}", passed=None, said=f"out of memory: {str(error)[:100]}")
            return
        _forget(resolve_device(given.device))
        last = time.monotonic() - turn_begun


def has_time(spent: float, last: float, limit: float) -> bool:
    """Whether a batch size begun after `spent` seconds ends in time, where the last one, half of it, took `last`."""
    return spent + STARTING_SECONDS + LONGER * last <= limit


def take_turn(task: Task, segments: int, steps: int, peak: float) -> None:
    """Train in segments, every loss read at the end of each, and say what it took."""
    train, losses = contender(task)
    begun = time.perf_counter()
    train(WARM_STEPS)
    first = time.perf_counter() - begun
    seconds = []
    for _ in range(segments):
        begun = time.perf_counter()
        train(steps)
        seconds.append((time.perf_counter() - begun) / steps)
    device = resolve_device(task.device)
    taken, memory = statistics.median(seconds), read_memory_bytes(device)
    say(f"batch {task.batch}", **rates(task, taken, peak), peak_gib=memory / 2**30, first_s=first, loss=losses[-1])
    shares = phases(train, device, PROFILED_STEPS * taken)
    say(f"batch {task.batch}, share of a step in %", **{name: 100 * share for name, share in shares.items()})


def contender(task: Task) -> tuple[Callable[[int], None], list[float]]:
    """Return what trains so many steps, and the list that it adds its losses to."""
    if task.contender.startswith(NANOGPT):
        return nanogpt_training(task)
    training = Training(task)
    return training.train, training.losses


def flops_of_step(task: Task) -> int:
    """Return the FLOPs of a forward and backward pass over the task's batch."""
    chosen = recipe_of(task.recipe)
    return flops_per_token(chosen.model, vocab_size=chosen.vocab_size) * task.batch * chosen.model.block_size


def rates(task: Task, seconds: float, peak: float) -> dict[str, float | None]:
    """Return tokens a second, and utilization in percent of the measured peak and of the data sheet's."""
    device, tokens = resolve_device(task.device), task.batch * recipe_of(task.recipe).model.block_size
    flops = flops_of_step(task) / seconds
    sheet = peak_flops_of_device(torch.cuda.get_device_name(device), "bf16") if device.type == "cuda" else None
    return {
        "tokens_per_s": tokens / seconds,
        "ms": 1e3 * seconds,
        "of_measured": 100 * flops / peak,
        "of_data_sheet": 100 * flops / sheet if sheet else None,
    }


def phases(train: Callable[[int], None], device: torch.device, seconds: float) -> dict[str, float]:
    """Return shares of a step's time by kind of kernel, and idle: what is left of the `seconds` the steps usually take.

    On a CPU, where kernels run one after the other and the profile slows them down, shares are of the time they took.
    """
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as seen:
        train(PROFILED_STEPS)
    taken = dict.fromkeys((*PHASES, "rest"), 0.0)
    for event in seen.key_averages():
        own = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        taken[phase_of(event.key)] += own / 1e6
    whole = max(seconds, sum(taken.values())) if is_cuda else sum(taken.values())
    return {**{name: own / whole for name, own in taken.items()}, "idle": 1 - sum(taken.values()) / whole}


def phase_of(kernel: str) -> str:
    """Return the phase of a kernel, by its name."""
    lowered = kernel.lower()
    return next((name for name, words in PHASES.items() if any(word in lowered for word in words)), "rest")


def _forget(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


if __name__ == "__main__":
    main()
