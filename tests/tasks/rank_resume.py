"""One rank that resumes from a checkpoint (`python -m tests.tasks.rank_resume`), and says what that took.

Arguments: rank, number of ranks, ddp or fsdp, the store's folder, and model and reference as JSON.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.training.parallel import SINGLE_RANK, is_peer_loss, join_ranks
from cairn.model.training.train_state import NamedTensor, TrainState
from cairn.storage.checkpoints.checkpoint import checkpoint_target, stage_checkpoint
from cairn.storage.checkpoints.payload import state_sha256
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.trainer.staging import SharedStaging
from cairn.tasks.trainer.staging_buffer import StagingBuffer
from cairn.tasks.trainer.tensor_exchange import to_group, to_record
from cairn.tasks.trainer.training_setup import CheckpointLoad
from tests.processes.fork_server import fork_server
from tests.tasks.stagings import document_of

CPU, VOCABULARY = torch.device("cpu"), 509
Mode = Literal["ddp", "fsdp"]


class CountingStore(LocalStore):
    """A store that counts the bytes of tensors and headers that are read from it."""

    read_bytes = 0

    def read_range(self, key: str, start: int, into: memoryview) -> int:
        """Fill `into` from `start`."""
        filled = super().read_range(key, start, into)
        self.read_bytes += filled
        return filled


def training() -> TrainingConfig:
    """Return what the state depends on beside its network."""
    return TrainingConfig(steps=4, global_batch=4, warmup_steps=1, precision="fp32", kernels="stock")


def stage_by_one(folder: Path, model: ModelConfig) -> tuple[CheckpointReference, str, int]:
    """Stage a fresh state in one process; return reference, digest and bytes."""
    state = TrainState.create(model, training(), VOCABULARY, CPU)
    tensors = state.live_tensors()
    groups = (to_group("weights", tensors), to_group("optimizer", tensors))
    target = checkpoint_target("r", step=0, attempt=1)
    staged = stage_checkpoint(LocalStore(folder), target, groups, document_of(tensors))
    reference = CheckpointReference(step=0, attempt=1, prefix=staged.prefix, manifest_sha256=staged.manifest_sha256)
    return reference, staged.state_sha256, staged.bytes


def resume_by(size: int, mode: Mode, folder: Path, model: ModelConfig, reference: CheckpointReference) -> list[Any]:
    """Resume on that many processes; return what each said."""
    words = [sys.executable, "-m", "tests.tasks.rank_resume"]
    told = json.dumps({"model": model.model_dump(), "reference": asdict(reference)})
    ranks = [fork_server().popen([*words, str(n), str(size), mode, str(folder), told]) for n in range(size)]
    assert [process.wait() for process in ranks] == [0] * size
    return [json.loads((folder / f"{mode}-{size}-{n}.json").read_text()) for n in range(size)]


def received_bytes() -> int:
    """Return what this process's TCP connections have received: tcpi_bytes_received of tcp(7)'s TCP_INFO."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += int.from_bytes(told[128:136], sys.byteorder)
    return total


def copy_share(state: TrainState) -> dict[str, Any]:
    """Copy what this rank writes as the trainer does; return the digest of each such tensor, and what was received."""
    rendezvous: Any = None
    shared, tensors = SharedStaging(state.ranks, rendezvous, state.live_tensors()), state.live_tensors()
    before, began = received_bytes(), time.monotonic()
    copies = StagingBuffer(CPU).copy(tensors, shared.writer, state.ranks.rank)
    seconds, received = time.monotonic() - began, received_bytes() - before
    return {"kept": digests(copies), "received": received, "copy_seconds": seconds}


def digests(tensors: Iterable[NamedTensor]) -> dict[str, str]:
    """Return the digest of every tensor."""
    return {named.name: state_sha256([to_record(named.name, named.tensor)]) for named in tensors}


def resident(field: str) -> int:
    """Return a number of bytes that /proc has of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    """Resume, and leave peak memory, own bytes and the digest of the whole state in the store's folder."""
    rank, size, mode, folder, told = sys.argv[1:]
    given = json.loads(told)
    place = SINGLE_RANK
    if size != "1":
        meeting = FileStore(f"{folder}/meeting-{mode}-{size}", int(size))
        parallel: Mode = "fsdp" if mode == "fsdp" else "ddp"
        place = join_ranks(int(rank), int(size), mode=parallel, device=CPU, store=meeting)
    measured = Path("/proc/self/clear_refs").exists()
    before = resident("VmRSS") if measured else 0
    if measured:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    store = CountingStore(Path(folder))
    load = CheckpointLoad(store, CheckpointReference(**given["reference"]))
    state = TrainState.create(ModelConfig(**given["model"]), training(), VOCABULARY, CPU, place, filled=False)
    said, began = dict[str, Any](), time.monotonic()
    try:
        said["promised"] = load.into(state)
    except Exception as error:
        said |= {"error": str(error), "peer_is_gone": is_peer_loss(error)}
    else:
        said |= {"seconds": time.monotonic() - began, "peak": resident("VmHWM") - before if measured else 0}
        said |= copy_share(state) if measured else {}
        whole = state.named_tensors()
        said["found"] = state_sha256(to_record(named.name, named.tensor) for named in whole)
        said["whole"] = digests(whole)
    Path(f"{folder}/{mode}-{size}-{rank}.json").write_text(json.dumps({**said, "read": store.read_bytes}))


if __name__ == "__main__":
    main()
