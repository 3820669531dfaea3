"""A run that one process begins and two go on with, on one device, beside a run of one process: are the bits the same?

NCCL takes no two processes on one device, so that gloo carries the gradients here, as it does between CPUs.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cairn.model.training.determinism import make_deterministic, resolve_device
from cairn.model.training.parallel import SINGLE_RANK, Ranks, join_ranks
from tests.model.tiny_run import TinyRun
from tests.programs.gpu.rows import say

MODES: dict[str, dict[str, Any]] = {
    "bf16 fused": {"precision": "bf16", "kernels": "fused", "global_batch": 8, "micro_batch": 2},
    "fp32 stock": {"precision": "fp32", "kernels": "stock", "global_batch": 8, "micro_batch": 2},
}
SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 128, "dropout": 0.1}
LAST_STEP, CHANGE_STEP, SECONDS = 12, 5, 75.0


def main() -> None:
    """Be one of the processes, or compare what they end with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", nargs=6, metavar=("RANK", "SIZE", "PORT", "MODE", "BEGIN", "END"))
    given = parser.parse_args()
    if given.child:
        rank, size, port, mode, begin, end = given.child
        make_deterministic(seed=1, threads=1)
        with_ranks = join(int(rank), int(size), int(port), given.device)
        print(train(given, mode, with_ranks, int(begin), int(end)))
        return
    for mode in MODES:
        compare(given, mode)


def compare(given: argparse.Namespace, mode: str) -> None:
    """Train a run whole, and one whose processes become two, and say whether they end alike."""
    with tempfile.TemporaryDirectory() as folder:
        start = partial(_start, given, mode, Path(folder))
        (whole,) = _answers([start(0, 1, 0, 0, LAST_STEP)])
        _answers([start(0, 1, 0, 0, CHANGE_STEP)])
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        both = _answers([start(rank, 2, store.port, CHANGE_STEP, LAST_STEP) for rank in range(2)])
    is_equal = both == [whole, whole]
    said = "equal" if is_equal else f"whole {whole[:60]}, two processes {both[0][:120]}"
    say(f"{mode}: 1, then 2 processes", passed=is_equal, said=said)


def join(rank: int, size: int, port: int, device: str) -> Ranks:
    """Join the other process as the trainer does, but for the library that carries tensors of the device."""
    if size == 1:
        return SINGLE_RANK
    if not hasattr(dist, "all_gather_single"):  # as PyTorch before 2.13 names it
        dist.all_gather_single = dist.all_gather_into_tensor
    begin = dist.init_process_group
    dist.init_process_group = lambda backend, **said: begin("gloo", **{**said, "device_id": None})
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    return join_ranks(rank, size, mode="ddp", device=resolve_device(device), store=store)


def train(given: argparse.Namespace, mode: str, ranks: Ranks, begin: int, end: int) -> str:
    """Train from step `begin`, whose state is in this folder, to step `end`, leave that state, and return its hash."""
    shape = {**SHAPE, **({"n_embd": 32, "block_size": 16} if given.tiny else {})}
    run = TinyRun(model=shape, device=resolve_device(given.device), ranks=ranks, **MODES[mode])
    if begin:
        run.state.load(torch.load(f"{begin}.pt", weights_only=True))
    run.train(end)
    if ranks.is_first:
        torch.save(run.tensors(), f"{end}.pt")
    found = hashlib.sha256()
    for name, values in sorted(run.bits().items()):
        found.update(name.encode() + values)
    if ranks.size > 1:
        dist.barrier()
        dist.destroy_process_group()
    return found.hexdigest()


def _start(
    given: argparse.Namespace, mode: str, folder: Path, rank: int, size: int, port: int, begin: int, end: int
) -> "subprocess.Popen[str]":
    said = [str(rank), str(size), str(port), mode, str(begin), str(end)]
    words = [sys.executable, "-m", "tests.programs.gpu.two_processes", "--device", given.device, "--child", *said]
    if given.tiny:
        words.append("--tiny")
    return subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _answers(processes: list["subprocess.Popen[str]"]) -> list[str]:
    """Wait for all of them and return the last line of each."""
    answers = [process.communicate(timeout=SECONDS)[0] for process in processes]
    for process, answer in zip(processes, answers, strict=True):
        if process.returncode:
            print(answer[-2000:], file=sys.stderr)
    return [(answer.strip().splitlines() or ["nothing"])[-1] for answer in answers]


if __name__ == "__main__":
    main()
