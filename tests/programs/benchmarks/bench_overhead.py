"""What of a run is not training: `python -m tests.programs.benchmarks.bench_overhead --segment-seconds 60`.

The same steps in turns: as `cairn train` with everything it does (a Prefect server of its own, heartbeats, records of
steps, commits, staging in the background), and as the bare training loop in one process that records nothing. Compared
is the time between two steps, both in the middle of a segment, so that each segment between them is paid for whole; how
long a start takes is told by `bench_start`. Beside the comparison stands what one run says of itself, which other work
on the machine disturbs less: the time outside of steps, and the core seconds of all but the thread that trains (with
`--set training.threads=2` its helpers are counted among the others). With `--observed` one run is looked at and tells
everybody (tests/programs/benchmarks/observers.py); many times a second all of that stands still: what does a step win?
Its steps must be shorter than a turn: `--set model.n_layer=1 --set training.global_batch=2`.
Linux only.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cairn.flows.orchestrator import prefect_server
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.step_log import StepRecord, read_step_records
from cairn.storage.stores.local_store import LocalStore
from tests.programs.benchmarks.observers import Observers, observing
from tests.programs.benchmarks.own_process import ROOT, answer_of, environment_in, set_options
from tests.programs.benchmarks.process_times import (
    children,
    command_line,
    main_thread_core_seconds,
    own_core_seconds,
    tree_core_seconds,
)

QUICKSTART = ROOT / "deployments" / "quickstart.toml"
CALIBRATION_STEPS, NEVER, LOOK_SECONDS = 8, 1_000_000, 0.1
PREFIX = "runs/bench"
# One thread: then the thread that trains is one, and what the others use is bookkeeping.
ALWAYS = (
    "training.threads=1",
    "training.warmup_steps=0",
    "training.probe_every_steps=0",
    f"evaluation.every_commits={NEVER}",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Steps in a segment, and the two steps between which time is counted."""

    segment: int
    first: int
    last: int

    def overrides(self) -> tuple[str, ...]:
        """Return what makes the command train so."""
        return (f"checkpoint.every_steps={self.segment}", f"training.steps={self.last + self.segment}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one contender took between the two steps; the last three only where there is more than training."""

    wall_seconds: float
    core_seconds: float
    step_seconds: float
    trainer_threads_core: float = 0.0
    flow_core: float = 0.0
    server_core: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What had been used when a step was seen: by the whole tree, and by its parts."""

    at: float
    tree: float
    trainer: float
    trainer_main: float
    server: float


def command(given: argparse.Namespace, plan: Plan, store: Path) -> list[str]:
    """Return the command line of a run."""
    options = set_options((*ALWAYS, *plan.overrides(), *given.set))
    base = [sys.executable, "-m", "cairn.cli.command", "train", str(given.config.resolve()), "--run-id", "bench"]
    return [*base, *options, "--store", str(store)]


@contextmanager
def started(
    given: argparse.Namespace, plan: Plan, folder: Path, store: Path, observers: Observers | None = None
) -> "Iterator[subprocess.Popen[bytes]]":
    """Yield the running command, and tell it to leave when the block ends."""
    options = set_options(observers.overrides) if observers else []
    environment = {**environment_in(folder), **(observers.environment if observers else {})}
    with (folder / "command.txt").open("wb") as output:
        process = subprocess.Popen(
            [*command(given, plan, store), *options],
            cwd=folder,
            env=environment,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def with_cairn(given: argparse.Namespace, plan: Plan, folder: Path, number: int) -> Share:
    """Run the command from before the first of the two steps until after the second, then tell it to leave."""
    store = folder / f"store-{number}"
    log = store / PREFIX / "steps"
    with started(given, plan, folder, store) as process:
        before = wait_for_step(process, log, plan.first, folder)
        after = wait_for_step(process, log, plan.last, folder)
    lines = records_of(store)
    trainer = after.trainer - before.trainer
    core, server = after.tree - before.tree, after.server - before.server
    main = after.trainer_main - before.trainer_main
    return Share(
        wall_seconds=after.at - before.at,
        core_seconds=core,
        step_seconds=sum(line.seconds for line in between(lines, plan)),
        trainer_threads_core=trainer - main,
        flow_core=core - trainer - server,
        server_core=server,
    )


def between(lines: Sequence[StepRecord], plan: Plan) -> list[StepRecord]:
    """Return the records of the steps that are counted."""
    return [line for line in lines if plan.first < line.step <= plan.last]


def records_of(store: Path) -> Sequence[StepRecord]:
    """Return the step records of the run."""
    log = RunLog(LocalStore(store), PREFIX.rpartition("/")[2])
    return read_step_records(log.store, log.prefix, log.refresh().attempts)


def wait_for_step(process: subprocess.Popen[bytes], log: Path, step: int, folder: Path) -> Reading:
    """Wait until `step` is in the folder of the run's records, and read the clocks."""
    while sum(path.read_bytes().count(b"\n") for path in log.glob("attempt-0001*.jsonl")) < step:
        if process.poll() is not None:
            raise SystemExit(f"the command left with {process.returncode}:\n{(folder / 'command.txt').read_text()}")
        time.sleep(LOOK_SECONDS)
    below = {command_line(child): child for child in children(process.pid)}
    trainer = next(pid for line, pid in below.items() if "cairn.tasks.trainer.trainer" in line)
    server = next(pid for line, pid in below.items() if prefect_server.__name__ in line)
    return Reading(
        at=time.monotonic(),
        tree=tree_core_seconds(process.pid),
        trainer=own_core_seconds(trainer),
        trainer_main=main_thread_core_seconds(trainer),
        server=own_core_seconds(server),
    )


def bare(given: argparse.Namespace) -> Share:
    """Train the same steps in this process, and nothing else."""
    import torch

    from cairn.model.data.batch_loader import BatchLoader
    from cairn.model.data.sample_order import SampleOrder
    from cairn.model.data.token_windows import TokenWindows
    from cairn.model.training.determinism import make_deterministic
    from cairn.model.training.train_state import TrainState
    from cairn.model.training.training_loop import StepObserver, train_until
    from cairn.model.training.training_step import StepInputs
    from cairn.storage.snapshots.data_snapshot import list_snapshots, open_snapshot
    from cairn.tasks.configuration.configuration_source import load_configuration

    config = load_configuration(given.config, overrides=[*ALWAYS, *given.set], environment={})
    store = LocalStore(given.data)
    snapshot = open_snapshot(store, list_snapshots(store)[0], given.data / "cache")
    training = config.training.model_copy(update={"steps": given.last + 1})
    make_deterministic(seed=training.seed, threads=training.threads)
    windows = TokenWindows(snapshot.train, config.model.block_size, snapshot.manifest.vocab_size)
    order = SampleOrder(window_count=windows.window_count, seed=training.seed, global_batch=training.global_batch)
    state = TrainState.create(config.model, training, snapshot.manifest.vocab_size, torch.device("cpu"))
    loader = BatchLoader(windows, order, state.device, end_step=training.steps)
    seconds: list[float] = []
    inputs = StepInputs(
        windows=windows,
        order=order,
        training=training,
        micro_batch=training.global_batch,
        loader=loader,
    )
    observer = StepObserver(on_step=lambda record: seconds.append(record.seconds), stop_requested=lambda: False)

    def train(until: int) -> None:
        train_until(state, inputs, observer, until_step=until)

    train(given.first)
    seconds.clear()
    wall, core = time.monotonic(), time.process_time()
    train(given.last)
    share = Share(
        wall_seconds=time.monotonic() - wall, core_seconds=time.process_time() - core, step_seconds=sum(seconds)
    )
    loader.close()
    return share


def run_bare(given: argparse.Namespace, first: int, last: int, data: Path) -> Share:
    """Let the bare loop take its turn in a process of its own."""
    words = ["--bare", "--config", str(given.config.resolve()), *set_options(given.set)]
    words += ["--first", str(first), "--last", str(last), "--data", str(data)]
    return Share(**answer_of("tests.programs.benchmarks.bench_overhead", *words))


def measure(given: argparse.Namespace, folder: Path) -> None:
    """Make the data, find how many steps fill a segment, then take turns."""
    made = with_cairn(given, Plan(segment=2, first=1, last=3), folder, 0)
    print(f"data made; {made.wall_seconds:.1f} s for two steps", file=sys.stderr)
    data = folder / "store-0"
    tried = run_bare(given, 2, 2 + CALIBRATION_STEPS, data)
    segment = max(2, math.ceil(given.segment_seconds / (tried.wall_seconds / CALIBRATION_STEPS)))
    plan = Plan(segment=segment, first=segment // 2, last=segment // 2 + given.segments * segment)
    print(f"{segment} steps a segment, {plan.last} steps a turn", file=sys.stderr)
    if given.observed:
        measure_observed(given, tried.wall_seconds / CALIBRATION_STEPS, folder)
        return
    rounds = []
    for number in range(1, given.rounds + 1):
        alone = run_bare(given, plan.first, plan.last, data)
        rounds.append((alone, with_cairn(given, plan, folder, number)))
        print(f"round {number} of {given.rounds}, load {os.getloadavg()[0]:.1f}: {rounds[-1]}", file=sys.stderr)
    report(rounds, plan)


def measure_observed(given: argparse.Namespace, step_seconds: float, folder: Path) -> None:
    """In one run, let all but trainer and server work, and stand still, in short turns; print the difference.

    Two runs after each other differ by several per cent on a machine that others use too, and so do two turns of
    seconds; the shorter a turn, the more of that noise its neighbour shares. What works is the flow with its exporters
    and its hanging webhook, and the page, which does the work of both turns in its own.
    """
    window, turns = given.window_seconds, 2 * given.rounds
    steps = math.ceil(3 * turns * window / step_seconds)  # one segment: between two the trainer would wait for the flow
    store, plan = folder / "store-observed", Plan(segment=steps, first=8, last=steps)
    log, borders = store / PREFIX / "steps", list[float]()
    with observing(store, "bench", folder) as observers, started(given, plan, folder, store, observers) as process:
        wait_for_step(process, log, plan.first, folder)
        page, began = observers.page_core_seconds(), time.monotonic()
        for turn in range(turns):
            let_work((process.pid, observers.page_pid), works=works_in(turn))
            borders.append(time.time())
            time.sleep(window)
        let_work((process.pid, observers.page_pid), works=True)
        borders.append(time.time())
        page_share = (observers.page_core_seconds() - page) / (time.monotonic() - began)
    slower = differences(borders, records_of(store))
    low, middle, high = statistics.quantiles(slower, n=4)
    error = 1.25 * (high - low) / 1.35 / math.sqrt(len(slower))  # of a median, from the quartiles
    print(f"steps of {1000 * step_seconds:.0f} ms, {len(slower)} pairs of turns of {window:g} s")
    print(f"with all that looks a step takes {middle:+.2f} % (error {error:.2f}; quartiles {low:+.2f} to {high:+.2f})")
    print(f"the page takes {100 * page_share:.2f} % of a core; load {os.getloadavg()[0]:.1f}")


def works_in(turn: int) -> bool:
    """Whether what looks works in a turn: neighbours change places, so that no drift counts for one of them."""
    return turn % 4 in (0, 3)


def let_work(processes: Sequence[int], *, works: bool) -> None:
    """Let processes go on, or stand still."""
    for pid in processes:
        os.kill(pid, signal.SIGCONT if works else signal.SIGSTOP)


def differences(borders: Sequence[float], steps: Sequence[StepRecord]) -> list[float]:
    """Return by how many per cent a step took longer where all worked, of each pair of turns with whole steps."""
    within: list[list[float]] = [[] for _ in borders]
    for step in steps:
        ended = step.at.timestamp() if step.at else 0.0
        turn = bisect(borders, ended) - 1
        if turn >= 0 and ended - step.seconds >= borders[turn]:  # not one that a border cuts
            within[turn].append(step.seconds)
    pairs = zip(range(0, len(borders), 2), within[::2], within[1::2], strict=False)
    means = [
        (works_in(turn), statistics.mean(one), statistics.mean(other)) for turn, one, other in pairs if one and other
    ]
    return [100 * ((one / other if works else other / one) - 1) for works, one, other in means]


def report(rounds: Sequence[tuple[Share, Share]], plan: Plan) -> None:
    """Print medians over rounds; shares in per cent."""
    runs = [run for _, run in rounds]
    length = statistics.median(run.wall_seconds for run in runs) / (plan.last - plan.first) * plan.segment
    print(f"\nsegments of {plan.segment} steps, {length:.0f} s; {len(rounds)} rounds, medians, per cent\n")
    print("| | by the clock | by the core |\n|---|---|---|")
    clock = statistics.median(run.wall_seconds / alone.wall_seconds - 1 for alone, run in rounds)
    core = statistics.median(run.core_seconds / alone.core_seconds - 1 for alone, run in rounds)
    print(f"| beside the bare loop, in turns | {100 * clock:.2f} | {100 * core:.2f} |")
    outside = statistics.median(1 - run.step_seconds / run.wall_seconds for run in runs)
    others = {
        "the trainer's other threads": [run.trainer_threads_core / run.core_seconds for run in runs],
        "the flow": [run.flow_core / run.core_seconds for run in runs],
        "Prefect's server": [run.server_core / run.core_seconds for run in runs],
    }
    total = statistics.median(sum(shares) for shares in zip(*others.values(), strict=True))
    print(f"| within one run: outside of steps, of the training thread | {100 * outside:.2f} | {100 * total:.2f} |")
    for name, shares in others.items():
        print(f"| of these, {name} | | {100 * statistics.median(shares):.2f} |")


def main() -> None:
    """Be the bare loop, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--segment-seconds", type=float, default=60.0)
    parser.add_argument("--segments", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--observed", action="store_true", help="what looking at a run adds to its steps; pairs: --rounds"
    )
    parser.add_argument("--window-seconds", type=float, default=0.2, help="with --observed: how long a turn is")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--last", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not any(item.startswith("training.precision=") for item in given.set):
        given.set += ["training.precision=fp32", "training.kernels=fused"]
    if given.bare:
        print(json.dumps(asdict(bare(given))))
        return
    with tempfile.TemporaryDirectory(prefix="cairn-bench-") as scratch:
        measure(given, Path(scratch))


if __name__ == "__main__":
    main()
