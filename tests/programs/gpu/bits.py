"""Whether every way to train gives the same bits, whatever happens on the way; every time in a process of its own.

A run of each mode is trained again; killed and continued; with every loss read at once; and past a bad step, which must
change nothing. Processes run beside each other as far as their estimated memory fits in what is free; one that has too
little all the same is asked again alone. Where kernels may add in any order, the verdict is only seen.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from cairn.model.configuration.training import TrainingConfig
from cairn.model.errors import NonFiniteLoss
from cairn.model.estimates.size_estimate import TrainingPlace, estimate_memory
from cairn.model.training.training_loop import DEFERRED_STEPS, FETCH_EVERY_STEP, FetchSchedule
from tests.programs.gpu.rows import say, time_limit
from tests.programs.gpu.training import CONTENDERS, Task, Training, recipe_of

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
MARGIN = 1.25
"""Times the estimate, which was compared with traced shapes alone."""
OUT_OF_MEMORY, NO_TIME = "out of memory", "no time"
LEAST_SECONDS = 45.0
"""With less time no process is begun."""
_SIGNS_OF_NO_MEMORY = ("outofmemory", "out of memory", "alloc_failed", "cannot allocate memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Memory, `free_bytes` of it, for processes that run beside each other, `most` of them; waits until one fits."""

    free_bytes: int
    most: int
    running: list[int] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def taken(self, needed_bytes: int) -> Iterator[None]:
        """Wait for so much room and have it."""
        with self.changed:
            self.changed.wait_for(lambda: fits(needed_bytes, self.running, free_bytes=self.free_bytes, most=self.most))
            self.running.append(needed_bytes)
        try:
            yield
        finally:
            with self.changed:
                self.running.remove(needed_bytes)
                self.changed.notify_all()


def fits(needed_bytes: int, running: Sequence[int], *, free_bytes: int, most: int) -> bool:
    """Whether one more process may run beside those that `running` need the memory of; alone any may."""
    return not running or (len(running) < most and sum(running) + needed_bytes <= free_bytes)


def main() -> None:
    """Be one process, or compare what many say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default="", help=f"by commas; all of {', '.join(MODES)} if not given")
    parser.add_argument("--recipe", default="gpt2")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--at-once", type=int, default=12, help="processes, as far as memory allows")
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
    """Train every mode in every way, and say a row as soon as a mode is complete; what is compiled comes last."""
    names = tuple(filter(None, given.modes.split(","))) or MODES
    given.until = time.monotonic() + time_limit()
    room, alone = Room(free_bytes=free_bytes(given.device), most=given.at_once), Room(free_bytes=0, most=1)
    needed = {name: needed_bytes(task_of(given, name)) for name in names}
    gib = {"free_gib": room.free_bytes / 2**30, "neediest_gib": max(needed.values()) / 2**30}
    say("memory for processes beside each other", **gib, at_most=room.most)
    found, short = dict[str, str](), list[tuple[str, dict[str, str]]]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, given.at_once // 4)) as modes:
        begun = {modes.submit(one_mode, given, room, Path(folder), name, needed[name], {}): name for name in names}
        for ended in as_completed(begun):
            name, answers = begun[ended], ended.result()
            if OUT_OF_MEMORY in answers.values():
                short.append((name, answers))
            else:
                found[name] = say_mode(name, answers)
        for name, answers in short:
            found[name] = say_mode(name, one_mode(given, alone, Path(folder), name, needed[name], answers))
    if "fused" in found and "fused-recomputed" in found:
        same = {"whole": found["fused"], "again": found["fused-recomputed"]}
        said = verdict(same, "again")
        say("recomputed activations beside kept ones", passed=holds([said]), said=said)


def free_bytes(device: str) -> int:
    """Return the device's free memory."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(torch.device(device))[0]
    return psutil.virtual_memory().available


def needed_bytes(task: Task) -> int:
    """Return what a process that trains this is estimated to need, and some more."""
    chosen, said = recipe_of(task.recipe), CONTENDERS[task.contender].training
    training = TrainingConfig(steps=1, warmup_steps=0, global_batch=task.batch, **said)
    estimate = estimate_memory(
        chosen.model.model_copy(update={"dropout": 0.1}),
        training,
        chosen.vocab_size,
        micro_batch=task.batch,
        recompute=bool(training.activation_checkpointing),
        place=TrainingPlace(on_cuda=task.device.startswith("cuda")),
    )
    return int(MARGIN * estimate.total_bytes)


def say_mode(name: str, answers: Mapping[str, str]) -> str:
    """Say a mode's row, and return what its whole run ended with."""
    said = {title: verdict(answers, part) for part, title in PARTS.items()}
    promised = CONTENDERS[name].deterministic
    say(name, passed=holds(list(said.values())) if promised else None, **said)
    return answers["whole"]


def holds(verdicts: Sequence[str]) -> bool | None:
    """Whether all are equal; None where nothing speaks against it, but time was over for some."""
    if set(verdicts) <= {"equal", "–"}:
        return True
    return None if set(verdicts) <= {"equal", "–", NO_TIME} else False


def one_mode(
    given: argparse.Namespace, room: Room, folder: Path, name: str, needed: int, known: Mapping[str, str]
) -> dict[str, str]:
    """Return what each process of a mode said, as `ask` does; only those that lacked memory are asked again."""
    own = folder / name
    own.mkdir(exist_ok=True)
    parts = ["whole", "first", *(part for part in PARTS if part != "second")]
    if name == SKIPS_BAD_STEPS:
        parts.remove("guarded")
    answers = {part: answer for part, answer in known.items() if answer != OUT_OF_MEMORY}

    def answer(part: str) -> str:
        with room.taken(needed):
            return ask(given, name, part, own)

    with ThreadPoolExecutor(len(parts)) as threads:
        waiting = {part: threads.submit(answer, part) for part in parts if part not in answers}
        answers |= {part: waited.result() for part, waited in waiting.items()}
    if "second" not in answers:  # it goes on from what the first has left
        answers["second"] = answer("second") if is_digest(answers["first"]) else answers["first"]
    return answers


def ask(given: argparse.Namespace, mode: str, part: str, folder: Path) -> str:
    """Have a child do it; return the hash of its last state, OUT_OF_MEMORY, NO_TIME, or `failed` and why."""
    left = given.until - time.monotonic()
    if left < LEAST_SECONDS:
        return NO_TIME
    command = [sys.executable, "-m", "tests.programs.gpu.bits", "--child", mode, part, str(folder)]
    for option in ("recipe", "batch", "steps", "device"):
        command += [f"--{option}", str(getattr(given, option))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # many processes share the cores
    try:
        limit = None if left == float("inf") else left - 5.0
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit)
    except subprocess.TimeoutExpired:
        return NO_TIME
    if done.returncode == 0:
        return done.stdout.splitlines()[-1]
    print(done.stderr[-1500:], file=sys.stderr)
    return reason_of(done.stderr, done.returncode)


def reason_of(said: str, status: int) -> str:
    """Return why a child failed, by the last line that it said: for want of memory, or else what it said."""
    last = (said.strip().splitlines() or [f"exit status {status}"])[-1]
    return OUT_OF_MEMORY if any(sign in last.lower() for sign in _SIGNS_OF_NO_MEMORY) else f"failed: {last[:120]}"


def is_digest(answer: str) -> bool:
    """Whether it is a hash."""
    return answer not in (OUT_OF_MEMORY, NO_TIME) and not answer.startswith("failed")


def verdict(answers: Mapping[str, str], part: str) -> str:
    """Say whether a part's hash is that of the whole run, or why there are not both."""
    if part not in answers:
        return "–"
    missing = [answers[name] for name in ("whole", part) if not is_digest(answers[name])]
    return missing[0] if missing else ("equal" if answers["whole"] == answers[part] else "differs")


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

    hook = dict(training.state.model.named_parameters())["ln_f.weight"].register_hook(
        spoil
    )  # at a leaf, which no compiler sees
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
