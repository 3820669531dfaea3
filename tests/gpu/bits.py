"""Whether every way to train gives the same bits, whatever happens on the way; every time in a process of its own.

A run of each mode is trained again; killed and continued; with every loss read at once; and past a bad step, which must
change nothing. Processes of one mode, and of several, run beside each other. What is compiled is not promised: its
verdict is only seen.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from cairn.model.errors import NonFiniteLoss
from cairn.model.training.training_loop import DEFERRED_STEPS, FETCH_EVERY_STEP, FetchSchedule
from tests.gpu.rows import say
from tests.gpu.training import CONTENDERS, Task, Training

MODES = (
    "fused", "stock", "fused-masked", "stock-masked", "fp32", "fp32-fused", "fp16", "fused-recomputed", "fused-muon",
    "fused-momentum", "fused-compiled", "stock-compiled", "fused-compiled-any-order",
)  # fmt: skip
PARTS = {
    "again": "run twice",
    "second": "kill and resume",
    "at-once": "losses read at once",
    "guarded": "a bad step",
}
SKIPS_BAD_STEPS = "fp16"
"""Its scaler skips them by itself, and the run goes on."""


def main() -> None:
    """Be one process, or compare what many say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default="", help=f"by commas; all of {', '.join(MODES)} if not given")
    parser.add_argument("--recipe", default="gpt2")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--at-once", type=int, default=12, help="processes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", nargs=3, metavar=("MODE", "PART", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tiny:
        given.recipe, given.steps, given.at_once = "tiny", 24, 2
        given.modes = given.modes or "fused"
    if given.child:
        mode, part, folder = given.child
        print(digest(task_of(given, mode), part, given.steps, Path(folder)))
    else:
        compare(given)


def task_of(given: argparse.Namespace, mode: str) -> Task:
    """Return what a mode's processes train."""
    return Task(contender=mode, recipe=given.recipe, device=given.device, batch=given.batch)


def compare(given: argparse.Namespace) -> None:
    """Train every mode in every way, some processes at a time; say a row as soon as a mode is complete."""
    names = tuple(filter(None, given.modes.split(","))) or MODES
    found = dict[str, str]()
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(given.at_once) as processes,
        ThreadPoolExecutor(len(names)) as modes,
    ):
        begun = {modes.submit(one_mode, given, processes, Path(folder), name): name for name in names}
        for ended in as_completed(begun):
            name, answers = begun[ended], ended.result()
            found[name] = answers["whole"]
            said = {title: verdict(answers, part) for part, title in PARTS.items()}
            promised = not CONTENDERS[name].training.get("compile")
            say(name, passed=set(said.values()) <= {"equal", "–"} if promised else None, **said)
    if "fused" in found and "fused-recomputed" in found:
        is_equal = found["fused"] == found["fused-recomputed"]
        say("recomputed activations beside kept ones", passed=is_equal, said="equal" if is_equal else "differs")


def one_mode(given: argparse.Namespace, processes: ThreadPoolExecutor, folder: Path, name: str) -> dict[str, str]:
    """Return what each process of a mode said: the hash of its last state, or `failed` and why."""
    own = folder / name
    own.mkdir()
    parts = ["whole", "first", *(part for part in PARTS if part != "second")]
    if name == SKIPS_BAD_STEPS:
        parts.remove("guarded")
    waiting = {part: processes.submit(ask, given, name, part, own) for part in parts}
    answers = {part: answer.result() for part, answer in waiting.items()}
    return {**answers, "second": processes.submit(ask, given, name, "second", own).result()}


def ask(given: argparse.Namespace, mode: str, part: str, folder: Path) -> str:
    """Have a child do it."""
    command = [sys.executable, "-m", "tests.gpu.bits", "--child", mode, part, str(folder)]
    for option in ("recipe", "batch", "steps", "device"):
        command += [f"--{option}", str(getattr(given, option))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # many processes share the cores
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return done.stdout.splitlines()[-1]
    print(done.stderr[-1500:], file=sys.stderr)
    return "failed: " + (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:120]


def verdict(answers: dict[str, str], part: str) -> str:
    """Say whether a part's hash is that of the whole run, or who failed."""
    if part not in answers:
        return "–"
    failed = [answers[name] for name in ("whole", part) if answers[name].startswith("failed")]
    return failed[0] if failed else ("equal" if answers["whole"] == answers[part] else "differs")


def digest(task: Task, part: str, steps: int, folder: Path) -> str:
    """Train `steps` steps as `part` says and return the state's hash; dropout is on, so that it is tried too.

    Parts: `whole`; `again`, the same; `at-once`, reading every loss; `first`, half of it, saved to `folder` as if the
    process died there; `second`, the rest from what was saved; `guarded`, whole but for one bad step on the way.
    """
    training, half = Training(task, dropout=0.1), steps // 2
    deferred = FetchSchedule(every_steps=DEFERRED_STEPS, every_seconds=3600.0)
    if part == "first":
        training.train(half, deferred)
        tensors = {named.name: named.tensor for named in training.state.named_tensors()}
        torch.save(tensors, folder / "state.pt")
    elif part == "second":
        training.state.load(torch.load(folder / "state.pt", weights_only=True))
        training.train(steps - half, deferred)
    elif part == "guarded":
        train_past_a_bad_step(training, steps, bad_step=half)
    else:
        training.train(steps, FETCH_EVERY_STEP if part == "at-once" else deferred)
    return training.digest()


def train_past_a_bad_step(training: Training, steps: int, *, bad_step: int) -> None:
    """Spoil one step's gradient, let later ones follow it unread, and go on where the guard has kept the state."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan") if training.state.step == bad_step - 1 else gradient

    hook = training.state.model.ln_f.weight.register_hook(spoil)  # at a leaf, which no compiler sees
    try:
        training.train(steps, FetchSchedule(every_steps=steps, every_seconds=3600.0))
    except NonFiniteLoss as error:
        if error.step != bad_step or training.state.step != bad_step - 1:
            raise
    else:
        raise RuntimeError("a step with a gradient that is not a number was not found")
    finally:
        hook.remove()
    training.train(steps - training.state.step, FetchSchedule(every_steps=DEFERRED_STEPS, every_seconds=3600.0))


if __name__ == "__main__":
    main()
