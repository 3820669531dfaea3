"""The real `cairn train`, flow and all, on the device: killed once and gone on with, or out of memory and made lighter.

`killed-once`: the command and its trainer are killed after the first commit; the same command again ends the run, and
`cairn replay` computes every committed segment anew. `out-of-memory`: the device gives the trainer less memory than it
needs, by the allocator's own limit; the attempt must end as oom and the next compute activations again. On a CPU the
memory is short because a fault is injected.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.estimates.size_estimate import TrainingPlace, estimate_memory
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import AttemptRecord
from cairn.storage.stores.local_store import LocalStore
from tests.programs.benchmarks.own_process import environment_in
from tests.programs.gpu.rows import say

RUN, POLL_SECONDS = "run", 0.25
VOCABULARY = 1024
"""Of the tokenizer that the run makes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A network and how long it is trained."""

    layers: int
    heads: int
    width: int
    block: int
    batch: int
    steps: int
    every_steps: int

    @property
    def model(self) -> ModelConfig:
        """The network's shape."""
        return ModelConfig(n_layer=self.layers, n_head=self.heads, n_embd=self.width, block_size=self.block)

    def toml(self, device: str) -> str:
        """Return the run's configuration."""
        return f"""
model_family = "gpu-check"
[data]
sources = ["python:topics", "python:docstrings"]
tokenizer = "bpe:{VOCABULARY}"
[model]
n_layer = {self.layers}
n_head = {self.heads}
n_embd = {self.width}
block_size = {self.block}
dropout = 0.1
[training]
steps = {self.steps}
global_batch = {self.batch}
micro_batch = {self.batch}
warmup_steps = 5
lr = 6e-4
device = "{device}"
probe_every_steps = {self.every_steps}
[checkpoint]
every_steps = {self.every_steps}
[evaluation]
every_commits = 2
batches = 2
batch_size = 8
"""


TINY = Sizes(layers=2, heads=2, width=32, block=32, batch=8, steps=40, every_steps=10)
LARGE = Sizes(layers=12, heads=12, width=768, block=1024, batch=32, steps=600, every_steps=100)
SHORT = Sizes(layers=12, heads=12, width=768, block=1024, batch=32, steps=20, every_steps=10)


class Command:
    """A folder with a configuration, a store, and the command that trains there."""

    def __init__(self, folder: Path, sizes: Sizes, device: str, variables: Mapping[str, str]) -> None:
        self.folder, self.log = folder, RunLog(LocalStore(folder / "store"), RUN)
        (folder / f"{RUN}.toml").write_text(sizes.toml(device), encoding="utf-8")
        own = {"CAIRN_STORE": str(folder / "store"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
        self.environment = {**environment_in(folder), **own, **variables}

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """Start a verb of `cairn` in a group of its own; what it says for people goes to this process's stderr."""
        command = [sys.executable, "-m", "cairn.cli.command", *words, "--json"]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def answer(self, *words: str) -> tuple[int, str]:
        """Run a verb to its end and return its exit status and what it printed."""
        process = self.start(*words)
        out, _ = process.communicate()
        return process.returncode, out

    def attempts(self) -> list[AttemptRecord]:
        """Return what the log says of the attempts."""
        return list(self.log.refresh().attempts)

    def committed_step(self) -> int:
        """Return the newest committed step, 0 if there is none."""
        newest = self.log.refresh().newest_committed
        return newest.committed.step if newest else 0


def main() -> None:
    """Do one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["killed-once", "out-of-memory"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        {"killed-once": killed_once, "out-of-memory": out_of_memory}[given.what](given, Path(folder))


def killed_once(given: argparse.Namespace, folder: Path) -> None:
    """Kill the run after its first commit, go on, and compute its segments again."""
    command = Command(folder, TINY if given.tiny else LARGE, given.device, {})
    begun = time.monotonic()
    process = command.start("train", f"{RUN}.toml")
    while command.committed_step() == 0 and process.poll() is None:
        time.sleep(POLL_SECONDS)
    committed = command.committed_step()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    say("killed", passed=committed > 0, seconds=time.monotonic() - begun, committed_step=committed)
    begun = time.monotonic()
    status, out = command.answer("train", f"{RUN}.toml")
    last = command.committed_step()
    passed = status == 0 and last == (TINY if given.tiny else LARGE).steps
    said = "" if passed else out[-200:]
    say("gone on with", passed=passed, seconds=time.monotonic() - begun, exit_status=status, last_step=last, said=said)
    say_attempts(command)
    begun = time.monotonic()
    status, out = command.answer("replay", RUN)
    outcomes = [segment["outcome"] for segment in json.loads(out)["segments"]] if out.startswith("{") else []
    passed = status == 0 and bool(outcomes) and set(outcomes) == {"equal"}
    say("replay", passed=passed, seconds=time.monotonic() - begun, outcomes=", ".join(outcomes) or out[-200:])


def out_of_memory(given: argparse.Namespace, folder: Path) -> None:
    """Train where memory is short, and say whether the log has the reason and the remedy."""
    is_cuda = given.device.startswith("cuda")
    variables = short_memory(given.device) if is_cuda else {"CAIRN_FAULTS": "oom@5"}
    command = Command(folder, TINY if given.tiny else SHORT, given.device, variables)
    status, out = command.answer("train", f"{RUN}.toml")
    say_attempts(command)
    attempts = command.attempts()
    recomputes = [record.started.activation_checkpointing for record in attempts]
    reasons = [record.ended.reason if record.ended else "open" for record in attempts]
    passed = status == 0 and reasons == ["oom", "completed"] and recomputes == [False, True]
    said = "" if passed else out[-200:]
    say("out of memory, and its remedy", passed=passed, exit_status=status, reasons=", ".join(reasons), said=said)


def short_memory(device: str) -> dict[str, str]:
    """Return a limit between what a trainer is estimated to need with its activations kept, and without them."""
    model, place = SHORT.model.model_copy(update={"dropout": 0.1}), TrainingPlace(on_cuda=True)
    training = TrainingConfig(steps=1, global_batch=SHORT.batch, warmup_steps=0, precision="bf16", kernels="fused")
    kept, again = (
        estimate_memory(
            model, training, VOCABULARY, micro_batch=SHORT.batch, recompute=recompute, place=place
        ).total_bytes
        for recompute in (False, True)
    )
    there = torch.cuda.mem_get_info(torch.device(device))[1]
    fraction = (kept + again) / 2 / there
    say("limit", kept_gib=kept / 2**30, recomputed_gib=again / 2**30, limit_gib=fraction * there / 2**30)
    return {"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{fraction:.4f}"}


def say_attempts(command: Command) -> None:
    """Say of each attempt how it ended, what it trained, and how fast."""
    for record in command.attempts():
        ended, started = record.ended, record.started
        say(
            f"attempt {started.attempt}",
            reason=ended.reason if ended else "open",
            detail=ended.detail[:120] if ended else "",
            device=started.placement.device_name or started.placement.device,
            recomputes=started.activation_checkpointing,
            first_step=started.first_step,
            last_step=ended.last_step if ended else None,
            tokens_per_s=ended.tokens / ended.gpu_seconds if ended and ended.gpu_seconds else None,
            starting_s=ended.starting_seconds if ended else None,
        )


if __name__ == "__main__":
    main()
