"""The training step on a GPU, and whether its bits are the same: `python -m tests.benchmarks.bench_gpu`.

Runs from a checkout on any machine with PyTorch, NumPy, pydantic and psutil; nothing has to be installed. nanoGPT's
step stands beside ours with `--nanogpt DIR`, a checkout of github.com/karpathy/nanoGPT. Every contender takes its turns
in a process of its own, contenders in turn within each round; one that fails (out of memory, no compiler) says so in
its row and the others go on. The report is Markdown, on stdout and with `--output` in a file.

    python -m tests.benchmarks.bench_gpu --nanogpt ../nanoGPT --output bench-gpu.md     some twenty minutes
    python -m tests.benchmarks.bench_gpu --device cpu --tiny                            the program itself, anywhere
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from model.estimates.device_specs import peak_flops_of_device
from model.estimates.size_estimate import count_parameters
from model.estimates.utilization import flops_per_token
from tests.benchmarks.gpu_turn import (
    CONTENDERS,
    NANOGPT,
    NANOGPT_COMPILED,
    RECIPES,
    Stall,
    Task,
    Turn,
    bits,
    recipe_of,
    stall,
    take_turn,
)

BITS_PARTS = {
    "again": "run twice",
    "second": "kill and resume",
    "at-once": "losses read at once",
    "guarded": "a bad step",
}
SAID_BYTES = 1500


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A child that did not do its task: the end of what it said."""

    why: str


def main() -> None:
    """Be one child, or make the whole report."""
    given = parser().parse_args()
    if given.child:
        print(json.dumps(serve(json.loads(given.child))))
        return
    if given.tiny:
        given.recipe, given.batches, given.steps, given.segments, given.bits_steps = "tiny", "4", 3, 2, 24
    report = "\n".join(lines(given)) + "\n"
    print(report, end="")
    if given.output:
        given.output.write_text(report)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--recipe", choices=RECIPES, default="gpt2")
    parser.add_argument("--batches", default="16,32,64", help="windows in a step, one table row each")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--bits", default="stock,fused,stock-compiled,fused-compiled,fused-compiled-any-order")
    parser.add_argument("--bits-steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--segments", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a network of no size, to try the program")
    parser.add_argument("--output", type=Path, help="a Markdown file for the report")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def serve(said: dict[str, str]) -> object:
    """Do what the parent asks of this process."""
    settings = json.loads(said["task"])
    task = Task(**{**settings, "nanogpt": Path(settings["nanogpt"]) if settings["nanogpt"] else None})
    if said["kind"] == "turn":
        return asdict(take_turn(task))
    if said["kind"] == "stall":
        return asdict(stall(task))
    return bits(task, said["part"], Path(said["folder"]))


def ask(task: Task, kind: str, *, part: str = "", folder: str = "") -> object:
    """Have a child do it; a `Failure` where it could not."""
    settings = json.dumps(asdict(task), default=str)
    said = json.dumps({"task": settings, "kind": kind, "part": part, "folder": folder})
    command = [sys.executable, "-m", "tests.benchmarks.bench_gpu", "--child", said]
    print(f"{kind} {part} {task.contender} batch {task.batch}", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    print(done.stderr[-SAID_BYTES:], file=sys.stderr)
    last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    return Failure(why=last[0][:120].replace("|", "/"))


def task_of(given: argparse.Namespace, contender: str, batch: int, steps: int) -> Task:
    """Return the task for one child."""
    return Task(
        contender=contender,
        recipe=given.recipe,
        device=given.device,
        batch=batch,
        steps=steps,
        segments=given.segments,
        nanogpt=given.nanogpt,
    )


def lines(given: argparse.Namespace) -> list[str]:
    """Measure everything and return the report's lines."""
    names = given.contenders.split(",")
    if given.nanogpt:
        names = [NANOGPT, NANOGPT_COMPILED, *names]
    turns = take_turns(given, names)
    found = [turn for each in turns.values() for turn in each if isinstance(turn, Turn)]
    said = [f"## The training step on a GPU: {given.recipe}", "", *machine_lines(found), ""]
    if not given.nanogpt:
        said += ["nanoGPT did not take part: no `--nanogpt DIR` was given.", ""]
    said += [*speed_lines(given, turns), "", *bits_lines(given), "", *stall_lines(given)]
    return said


def take_turns(given: argparse.Namespace, names: list[str]) -> dict[tuple[str, int], list[Turn | Failure]]:
    """Let every contender take its turns at every batch size; who failed once is not asked again."""
    turns: dict[tuple[str, int], list[Turn | Failure]] = {}
    for batch in map(int, given.batches.split(",")):
        for number in range(given.rounds):
            first = number % len(names)  # whoever comes first finds the device cool: not always the same one
            for name in [*names[first:], *names[:first]]:
                before = turns.setdefault((name, batch), [])
                if not any(isinstance(turn, Failure) for turn in before):
                    said = ask(task_of(given, name, batch, given.steps), "turn")
                    before.append(Turn(**said) if isinstance(said, dict) else Failure(why=getattr(said, "why", "?")))
    return turns


def machine_lines(found: list[Turn]) -> list[str]:
    """Say where this was measured and what the device can do, as measured and as promised."""
    said = [f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}."]
    if found:
        peak = statistics.median(turn.peak_flops for turn in found)
        promised = peak_flops_of_device(found[0].device_name, "bf16")
        sheet = f"{promised / 1e12:,.0f}" if promised else "not listed"
        said.append(
            f"{found[0].device_name}: bf16 products {peak / 1e12:,.1f} TFLOP/s measured, data sheet {sheet}. "
            "FLOPs of a token: 6 N + 12 L d T, N without the position table and without padding."
        )
    return said


def speed_lines(given: argparse.Namespace, turns: dict[tuple[str, int], list[Turn | Failure]]) -> list[str]:
    """Return the table of speeds; MFU against the measured peak and the data sheet."""
    chosen = recipe_of(given.recipe)
    counted = count_parameters(chosen.model, chosen.vocab_size)
    flops = flops_per_token(chosen.model, counted)
    said = [
        "| contender | batch | tokens/s | ms | MFU, measured | MFU, data sheet | peak GiB | first 10 steps s | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, batch), each in turns.items():
        done = [turn for turn in each if isinstance(turn, Turn)]
        failed = [turn for turn in each if isinstance(turn, Failure)]
        if failed:
            said.append(f"| {name} | {batch} | failed: {failed[0].why} | | | | | | |")
            continue
        seconds = statistics.median(turn.step_seconds for turn in done)
        rate = batch * chosen.model.block_size / seconds
        promised = peak_flops_of_device(done[0].device_name, "bf16")
        of_measured = flops * rate / statistics.median(turn.peak_flops for turn in done)
        said.append(
            f"| {name} | {batch} | {rate:,.0f} | {seconds * 1e3:,.1f} | {of_measured:.1%} "
            f"| {f'{flops * rate / promised:.1%}' if promised else '–'} "
            f"| {max(turn.peak_bytes for turn in done) / 2**30:.1f} "
            f"| {statistics.median(turn.first_seconds for turn in done):.1f} | {done[-1].loss:.4f} |"
        )
    return said


def bits_lines(given: argparse.Namespace) -> list[str]:
    """Return which contenders give the same bits in another process, however it came to the last step."""
    batch = min(map(int, given.batches.split(",")))
    said = [
        f"Bits after {given.bits_steps} steps at batch {batch} with dropout, every process fresh:",
        "",
        f"| contender | {' | '.join(BITS_PARTS.values())} |",
        f"|---|{'---|' * len(BITS_PARTS)}",
    ]
    for name in filter(None, given.bits.split(",")):
        task = task_of(given, name, batch, given.bits_steps)
        with tempfile.TemporaryDirectory() as folder:
            whole = ask(task, "bits", part="whole")
            ask(task, "bits", part="first", folder=folder)
            others = [ask(task, "bits", part=part, folder=folder) for part in BITS_PARTS]
        said.append(f"| {name} | {' | '.join(verdict(whole, other) for other in others)} |")
    return said


def verdict(whole: object, other: object) -> str:
    """Say whether two hashes agree, or who failed."""
    for said in (whole, other):
        if isinstance(said, Failure):
            return f"failed: {said.why}"
    return "equal" if whole == other else "**differs**"


def stall_lines(given: argparse.Namespace) -> list[str]:
    """Say how long a checkpoint's copy stops training."""
    batch = min(map(int, given.batches.split(",")))
    said = ask(task_of(given, "fused", batch, given.steps), "stall")
    if not isinstance(said, dict):
        return [f"Checkpoint stall: failed: {getattr(said, 'why', said)}"]
    found = Stall(**said)
    return [
        f"Checkpoint stall: {found.state_bytes / 1e9:.2f} GB to the host in {found.ours_seconds * 1e3:,.1f} ms "
        f"({found.state_bytes / found.ours_seconds / 1e9:.1f} GB/s), {found.ours_seconds / found.plain_seconds:.2f} × "
        "a plain copy tensor by tensor into page-locked memory at hand."
    ]


if __name__ == "__main__":
    main()
