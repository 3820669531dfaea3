"""From `cairn train` to the first training step, with no server running: `make bench-start`.

Five starts in turns, each a real command: of a new run on a machine that was never used (neither Prefect's database nor
caches), of a new run, of a new run whose text the store has, of the same run continued, and continued without caches.
Beside them a bare PyTorch script with a network of the same shape on the same tokens, new and continued from
`torch.save`: what no orchestrator could undercut. Phases are told by what the command prints and which processes it
has; core seconds are those of the command and all it started, until the first step. `--before DIR` lets another
checkout of this project take every turn too. Linux only.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.storage.snapshots.data_snapshot import list_snapshots
from cairn.storage.stores.local_store import LocalStore
from tests.programs.benchmarks.own_process import ROOT, environment_in, set_options
from tests.programs.benchmarks.process_times import children, command_line, tree_core_seconds

BARE = Path(__file__).parent / "bare_training.py"
QUICKSTART = ROOT / "deployments" / "quickstart.toml"
CHECKED, SERVER, TRAINER, CLAIMED, STEP = "checked", "server begins", "trainer begins", "claimed", "first step"
PHASES = (CHECKED, SERVER, TRAINER, CLAIMED, STEP)
FRESH, NEW, KNOWN_TEXT, CONTINUED = "fresh-machine", "new", "new-of-known-text", "continued"
WITHOUT_CACHES = "continued-without-caches"
STARTS = (FRESH, NEW, KNOWN_TEXT, CONTINUED, WITHOUT_CACHES)
BARE_NEW, BARE_CONTINUED = "bare script", "bare script, continued"


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One start: seconds from the shell to each phase that was seen, and seconds of a core until the first step."""

    seconds: dict[str, float]
    core_seconds: float


@dataclass(kw_only=True, slots=True)
class Folder:
    """Where one contender's commands work: its code, its store, its caches."""

    source: Path
    path: Path
    config: Path
    overrides: Sequence[str]

    def forget(self, *names: str) -> None:
        """Delete what a machine keeps under these names."""
        for name in names:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def start(self) -> Start:
        """Run the command until its first step, then tell it to leave."""
        train = ("train", str(self.config), "--run-id", "bench", *set_options(self.overrides))
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "cairn.cli.command", *train, "--store", str(self.path / "store")],
            cwd=self.path,
            env=environment_in(self.path, self.source),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        return watched(process, began)


def watched(process: subprocess.Popen[str], began: float) -> Start:
    """Note when each phase is seen; ends the process, gently, after its first step."""
    seconds: dict[str, float] = {}
    threading.Thread(target=note_children, args=(process.pid, began, seconds), daemon=True).start()
    assert process.stderr is not None
    said, core = [], 0.0
    for line in process.stderr:
        said.append(line)
        if (phase := phase_of(line)) and phase not in seconds:
            seconds[phase] = time.monotonic() - began
        if STEP in seconds:
            core = tree_core_seconds(process.pid)
            process.send_signal(signal.SIGTERM)
            break
    process.stderr.read()
    if process.wait() not in (0, 75) or STEP not in seconds:
        raise SystemExit(f"the command left with {process.returncode}:\n{''.join(said)}")
    return Start(seconds=seconds, core_seconds=core)


def phase_of(line: str) -> str | None:
    """Return the phase that ends with this line of the command's."""
    if line.startswith("a temporary Prefect server"):
        return CHECKED
    if line.startswith("attempt "):
        return CLAIMED
    return STEP if line.startswith("step ") else None


def note_children(pid: int, began: float, seconds: dict[str, float]) -> None:
    """Note when server and trainer are there, looking twenty times a second."""
    while STEP not in seconds and Path(f"/proc/{pid}").exists():
        for child in children(pid):
            command = command_line(child)
            if "prefect_server" in command or "uvicorn" in command:
                seconds.setdefault(SERVER, time.monotonic() - began)
            elif "cairn.tasks.trainer.trainer" in command:
                seconds.setdefault(TRAINER, time.monotonic() - began)
        time.sleep(0.05)


def bare(folder: Folder, *, resumed: bool) -> Start:
    """Run the bare script to its first step on the snapshot's first shard."""
    data = folder.path / "store" / "data" / list_snapshots(LocalStore(folder.path / "store"))[0]
    shard = min(data.glob("*train*"))
    began, before = time.monotonic(), os.times()
    subprocess.run(
        [sys.executable, str(BARE), str(shard), str(folder.path / "bare.pt"), *(["--continue"] if resumed else [])],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    after = os.times()
    core = after.children_user + after.children_system - before.children_user - before.children_system
    return Start(seconds={STEP: time.monotonic() - began}, core_seconds=core)


def one_round(folder: Folder, kinds: Sequence[str]) -> dict[str, Start]:
    """Return one start of each kind; each is left what its machine would have, whatever was started before."""
    starts = {}
    for kind in kinds:
        if kind in (FRESH, NEW):
            folder.forget("store")
        if kind == KNOWN_TEXT:
            folder.forget("store/runs")
        elif kind != CONTINUED:
            folder.forget("cache")
        if kind == FRESH:
            folder.forget("prefect")
        starts[kind] = folder.start()
        print(f"{kind}: {starts[kind]}", file=sys.stderr)
    return starts | {BARE_NEW: bare(folder, resumed=False), BARE_CONTINUED: bare(folder, resumed=True)}


def report(rounds: Sequence[dict[str, Start]]) -> None:
    """Print medians: the phases, core seconds, and how many times the bare script's start it is."""
    print(
        "| start | "
        + " | ".join(f"{phase}, s" for phase in PHASES)
        + " | core, s | × bare by the clock | by the core |"
    )
    print("|---" * (len(PHASES) + 4) + "|")
    for name in rounds[0]:
        peer = BARE_CONTINUED if "continued" in name else BARE_NEW
        cells = [median(start[name].seconds.get(phase) for start in rounds) for phase in PHASES]
        clock = median(start[name].seconds[STEP] / start[peer].seconds[STEP] for start in rounds)
        core = median(start[name].core_seconds / start[peer].core_seconds for start in rounds)
        used = median(start[name].core_seconds for start in rounds)
        print(f"| {name} | {' | '.join(cells)} | {used} | {clock} | {core} |")


def median(values: Iterator[float | None]) -> str:
    """Format the median of what was seen."""
    seen = [value for value in values if value is not None]
    return f"{statistics.median(seen):.1f}" if seen else "–"


def main() -> None:
    """Take turns, then report each contender."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS, metavar="START", help=", ".join(STARTS))
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--before", type=Path, help="another checkout of this project, to take turns with this one")
    given = parser.parse_args()
    sources = {"this checkout": ROOT} | ({str(given.before): given.before.resolve()} if given.before else {})
    rounds: dict[str, list[dict[str, Start]]] = {name: [] for name in sources}
    with tempfile.TemporaryDirectory(prefix="cairn-bench-") as scratch:
        for number in range(given.rounds):
            for place, (name, source) in enumerate(sources.items()):
                folder = Folder(
                    source=source, path=Path(scratch) / str(place), config=given.config.resolve(), overrides=given.set
                )
                folder.path.mkdir(exist_ok=True)
                rounds[name].append(one_round(folder, given.starts))
            print(f"round {number + 1} of {given.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    for name, made in rounds.items():
        print(f"\n{name}, {len(made)} rounds, medians\n")
        report(made)


if __name__ == "__main__":
    main()
