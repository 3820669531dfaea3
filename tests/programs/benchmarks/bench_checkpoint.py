"""Saving and resuming beside PyTorch's own ways: `make bench-checkpoint ARGS="--parameters 124M"`.

Savers take turns in one process, so that whatever else the machine does meets them all; medians, and ratios within a
round. Peak memory is of a process of its own for each. The slow-down is of steps of a small model while a checkpoint
of the chosen size is staged, in turns with steps while nothing is. Resuming is from the start of a process to the end
of its first step. `--only large` stages a state that is nowhere but in its host copy, and resumes it. `--store s3://`
starts a server of the tests' (Ceph where it is installed, else the emulator), or uses the one that AWS_ENDPOINT_URL
names where a bucket is given.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.training.determinism import make_deterministic
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_step import StepInputs, take_step
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.open_store import open_store
from cairn.tasks.trainer.training_setup import CheckpointLoad
from tests.programs.benchmarks import large_state
from tests.programs.benchmarks.checkpoint_savers import RUN, SAVERS, CairnSaver, Saved, state_bytes
from tests.programs.benchmarks.own_process import answer_of, resident_bytes
from tests.s3.ceph_server import PROGRAMS
from tests.s3.servers import BUCKET, s3_server

SIZES = {
    "1M": (ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=128), 1024),
    "10M": (ModelConfig(n_layer=6, n_head=6, n_embd=384, block_size=256), 1024),
    "30M": (ModelConfig(n_layer=6, n_head=6, n_embd=384, block_size=256), 50304),
    "1011M": (ModelConfig(n_layer=20, n_head=16, n_embd=2048, block_size=1024), 1024),
    "124M": (ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024), 50304),
    "1558M": (ModelConfig(n_layer=48, n_head=25, n_embd=1600, block_size=1024), 50304),
}
SMALL = "1M"
WARM_STEPS = 5
CEPH_BYTES = 12 * 1024**3
"""Room for a 124M state from every saver, and for what the server has yet to collect."""


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", choices=SIZES, default="30M")
    parser.add_argument("--store", default="", help="file:///folder (default: a temporary one), s3:// or s3://bucket")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--savers", default=",".join(SAVERS), help="which, by commas")
    parser.add_argument("--only", choices=["save", "memory", "slow-down", "resume", "large"], help="one part of it")
    parser.add_argument("--turn", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.turn:
        {"memory": peak_turn, "resume": resume_turn, "large": large_turn}[given.turn[0]](given, given.turn[1])
        return
    with a_store(given.store) as url:
        given.store = url
        parts = {"save": report_saves, "memory": report_memory, "slow-down": report_slow_down, "resume": report_resume}
        for name, part in parts.items():
            if given.only in (None, name):
                part(given)
        if given.only == "large":
            large_state.report(turn(given, "large", "stage"), turn(given, "large", "resume"))


@contextmanager
def a_store(asked: str) -> Iterator[str]:
    """Give the URL of an empty folder or bucket."""
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
        if not asked.startswith("s3"):
            yield f"{asked or f'file://{folder}'}"
            return
        if asked == "s3://":
            kind = start_s3(Path(folder))
            print(f"the store: {'Ceph in memory' if kind == 'ceph' else 'the emulator, which says little of a rate'}")
        yield f"{asked if asked != 's3://' else f's3://{BUCKET}'}/{time.time_ns()}"


def start_s3(folder: Path) -> str:
    """Start the server that this process's clients go to: Ceph where it is installed, else the emulator; says which."""
    kind = "ceph" if all(map(shutil.which, PROGRAMS)) else "quick"
    os.environ["CEPH_MEMORY_BYTES"] = str(CEPH_BYTES)
    os.environ.update(s3_server(kind, folder).environment())
    return kind


def fresh_state(size: str, device: str) -> TrainState:
    """Return a state of that size, with moments that are not zero."""
    shape, vocab_size = SIZES[size]
    state = TrainState.create(shape, _training(), vocab_size, torch.device(device))
    for named in state.live_tensors():
        if named.group == "optimizer" and named.tensor.ndim:
            named.tensor.uniform_(0, 1e-3)
    return state


def _training() -> TrainingConfig:
    return TrainingConfig(steps=2**30, global_batch=1, warmup_steps=0, precision="fp32", kernels="stock")


def report_saves(given: argparse.Namespace) -> None:
    """Let all save in turns; print stall, time until safe, and both beside the least they could be."""
    make_deterministic(seed=1, threads=given.threads)
    state = fresh_state(given.parameters, given.device)
    size, names = state_bytes(state), given.savers.split(",")
    savers = {name: SAVERS[name](state, given.store) for name in names}
    found: dict[str, list[Saved]] = {name: [] for name in names}
    for number in range(given.rounds + 1):
        for name in names:
            saved = savers[name]()
            if number:  # the first one makes what the others use again
                found[name].append(saved)
    print(f"\n{given.parameters}, {size / 1e6:.0f} MB, medians of {given.rounds} rounds, {given.store}")
    heads = ("stall s", "x plain copy", "by cores", "safe after s", "MB/s", "x raw write")
    print(" " * 16 + "".join(f"{head:>14}" for head in heads))
    for name, saves in found.items():
        stall, safe = _median(saves, "stall_seconds"), _median(saves, "safe_seconds")
        beside_copy = _ratio(saves, found.get("plain copy"), "stall_seconds")
        by_cores = _ratio(saves, found.get("plain copy"), "stall_core_seconds")
        beside_raw = _ratio(found.get("raw write"), saves, "safe_seconds")
        cells = (f"{stall:.3f}", beside_copy, by_cores, f"{safe:.2f}", f"{size / 1e6 / safe:.0f}", beside_raw)
        print(f"{name:16}" + "".join(f"{cell:>14}" for cell in cells))


def _median(saves: list[Saved], field: str) -> float:
    return statistics.median(getattr(saved, field) for saved in saves)


def _ratio(above: list[Saved] | None, below: list[Saved] | None, field: str) -> str:
    if not above or not below:
        return "-"
    pairs = zip(above, below, strict=True)
    return f"{statistics.median(getattr(one, field) / getattr(other, field) for one, other in pairs):.2f}"


def report_memory(given: argparse.Namespace) -> None:
    """Print what each takes at its peak beside the state itself, in states."""
    print(f"\npeak memory of two saves of {given.parameters}, beside the state itself")
    for name in (name for name in given.savers.split(",") if name != "raw write"):
        said = turn(given, "memory", name)
        print(f"{name:16}{said['extra_bytes'] / 1e6:8.0f} MB {said['extra_bytes'] / said['state_bytes']:6.2f} states")


def peak_turn(given: argparse.Namespace, name: str) -> None:
    """Save twice and say what the peak was beside that of having the state."""
    make_deterministic(seed=1, threads=given.threads)
    state = fresh_state(given.parameters, given.device)
    peak = large_state.Peak()
    save = SAVERS[name](state, f"{given.store}/memory-{time.time_ns()}")
    save()
    save()
    print(json.dumps({"extra_bytes": peak.bytes, "state_bytes": state_bytes(state)}))


def report_slow_down(given: argparse.Namespace) -> None:
    """Train the small model while a checkpoint is staged and while none is, in turns; print what a checkpoint costs."""
    make_deterministic(seed=1, threads=given.threads)
    saver = CairnSaver(fresh_state(given.parameters, given.device), f"{given.store}/slow-down")
    step = _small_step(given.device)
    for _ in range(WARM_STEPS):
        step()
    saver.save()
    quiet, busy, staged_seconds = list[float](), list[float](), list[float]()
    for _ in range(given.rounds):
        saver.begin()
        begun, steps = time.perf_counter(), 0
        while saver.staging.is_in_progress:
            step()
            steps += 1
        staged_seconds.append(time.perf_counter() - begun)
        busy.append(staged_seconds[-1] / max(1, steps))
        saver.commit()
        saver.sweep()
        begun = time.perf_counter()
        for _ in range(max(1, steps)):
            step()
        quiet.append((time.perf_counter() - begun) / max(1, steps))
    slower = statistics.median(one / other for one, other in zip(busy, quiet, strict=True))
    lost = statistics.median(
        seconds * (1 - other / one) for seconds, one, other in zip(staged_seconds, busy, quiet, strict=True)
    )
    print(f"\nsteps of the {SMALL} model while {given.parameters} is staged: {1e3 * statistics.median(busy):.1f} ms,")
    print(f"while nothing is: {1e3 * statistics.median(quiet):.1f} ms, ratio {slower:.2f};")
    print(f"staged in {statistics.median(staged_seconds):.2f} s, training lost {lost:.2f} s to each checkpoint")


def _small_step(device: str) -> Callable[[], object]:
    shape, vocab_size = SIZES[SMALL]
    state = TrainState.create(shape, _training(), vocab_size, torch.device(device))
    return _stepper(state, shape, vocab_size)


def _stepper(state: TrainState, shape: ModelConfig, vocab_size: int) -> Callable[[], object]:
    tokens = np.random.default_rng(0).integers(0, vocab_size, 200_000).astype(np.uint16)
    windows = TokenWindows([tokens], shape.block_size, vocab_size)
    order = SampleOrder(window_count=windows.window_count, seed=1, global_batch=1)
    training = _training().model_copy(update={"micro_batch": 1})
    inputs = StepInputs(windows=windows, order=order, training=training, micro_batch=1)
    return lambda: take_step(state, inputs)


def report_resume(given: argparse.Namespace) -> None:
    """Print seconds from the start of a process to the end of its first step, in turns."""
    make_deterministic(seed=1, threads=given.threads)
    state, given.store = fresh_state(given.parameters, given.device), f"{given.store}/resume"
    SAVERS["cairn"](state, given.store)()
    SAVERS["torch.save"](state, given.store)()
    del state
    found: dict[str, list[dict[str, float]]] = {"cairn": [], "torch.load": []}
    for _ in range(given.rounds):
        for name, turns in found.items():
            turns.append(turn(given, "resume", name))
    print(f"\nfrom the start of a process to its first step, {given.parameters}")
    for name, turns in found.items():
        middle = {key: statistics.median(one[key] for one in turns) for key in turns[0]}
        print(
            f"{name:16}{middle['first_step']:8.2f} s, of which state read and in place {middle['loaded']:.2f} s, "
            f"peak {middle['peak_states']:.2f} states"
        )
    ratios = [a["first_step"] / b["first_step"] for a, b in zip(found["cairn"], found["torch.load"], strict=True)]
    print(f"cairn, which verifies every hash, takes {statistics.median(ratios):.2f} times as long as torch.load")


def resume_turn(given: argparse.Namespace, name: str) -> None:
    """Resume as a new process does, and say when what was done, on the clock that began with the process."""
    make_deterministic(seed=1, threads=given.threads)
    begun, (shape, vocab_size) = float(os.environ["BENCH_BEGUN"]), SIZES[given.parameters]
    device = torch.device(given.device)
    reading = time.monotonic()
    if name == "cairn":
        store = open_store(given.store)
        state_of_run = RunLog(store, RUN).refresh()
        assert state_of_run.newest_committed is not None
        resumed = CheckpointLoad(store, state_of_run.newest_committed.committed.reference)
    state = TrainState.create(shape, _training(), vocab_size, device, filled=False)
    if name == "cairn":
        resumed.into(state)
    else:
        import fsspec

        with fsspec.open(f"{given.store}/torch-save.pt", "rb") as file:
            state.load(torch.load(file, map_location=device))
    read = time.monotonic() - reading
    _stepper(state, shape, vocab_size)()
    said = {
        "first_step": time.monotonic() - begun,
        "loaded": read,
        "peak_states": resident_bytes("VmHWM") / state_bytes(state),
    }
    print(json.dumps(said))


def large_turn(given: argparse.Namespace, name: str) -> None:
    """Stage the state, or resume it, and say what that took."""
    make_deterministic(seed=1, threads=given.threads)
    (shape, vocab_size), training = SIZES[given.parameters], _training()
    state, url = large_state.StateElsewhere(shape, training, vocab_size), f"{given.store}/large"
    staging = name == "stage"
    said = large_state.stage(state, url) if staging else large_state.resume(state, shape, training, vocab_size, url)
    print(json.dumps(said))


def turn(given: argparse.Namespace, kind: str, name: str) -> dict[str, float]:
    """Return what a process of its own says."""
    words = ["--turn", kind, name, "--parameters", given.parameters, "--store", given.store]
    words += ["--threads", str(given.threads), "--device", given.device]
    said: dict[str, float] = answer_of(
        "tests.programs.benchmarks.bench_checkpoint", *words, BENCH_BEGUN=str(time.monotonic())
    )
    return said


if __name__ == "__main__":
    main()
