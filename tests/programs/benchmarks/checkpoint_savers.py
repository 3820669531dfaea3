"""Ways to save a train state, each told apart by two times: how long training stands still, and how long until safe.

A saver is made once and saves again and again, as in a run. Safe means on the disk (fsync), or answered by the store.
"""

import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from cairn.model.training.train_state import TrainState
from cairn.storage.checkpoints.checkpoint import checkpoint_target, commit_checkpoint
from cairn.storage.checkpoints.payload import TrainerDocument, small_tensor
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.open_store import open_store
from cairn.tasks.trainer.staging import HostCheckpoint, Staging
from cairn.tasks.trainer.staging_buffer import StagingBuffer
from cairn.tasks.trainer.tensor_exchange import to_group
from cairn.tasks.trainer.trainer_protocol import Waiting
from tests.entries import opened, started, writer

RUN = "bench"


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What one save took: training's stand-still by the clock and in core seconds, and the time until it is safe."""

    stall_seconds: float
    stall_core_seconds: float
    safe_seconds: float


class Watch:
    """Begins with the stand-still."""

    def __init__(self) -> None:
        self.begun, self.core_begun = time.perf_counter(), time.process_time()

    def stopped(self) -> "Watch":
        """Take the end of the stand-still."""
        self.stall, self.core = time.perf_counter() - self.begun, time.process_time() - self.core_begun
        return self

    def saved(self) -> Saved:
        """Return all times, now that everything is safe."""
        return Saved(
            stall_seconds=self.stall, stall_core_seconds=self.core, safe_seconds=time.perf_counter() - self.begun
        )


Saver = Callable[[], Saved]


def state_bytes(state: TrainState) -> int:
    """Return how much there is to save."""
    return sum(named.tensor.nbytes for named in state.live_tensors())


def plain_copy(state: TrainState, url: str) -> Saver:
    """Return what copies every tensor into memory that is there: the least a stall can be."""
    tensors = state.live_tensors()
    copies = [torch.zeros_like(named.tensor) for named in tensors]

    def save() -> Saved:
        watch = Watch()
        for named, copy in zip(tensors, copies, strict=True):
            copy.copy_(named.tensor)
        return watch.stopped().saved()

    return save


def cairn(state: TrainState, url: str) -> Saver:
    """Return what the trainer and its parent do between two segments: copy, stage, commit."""
    return CairnSaver(state, url).save


class CairnSaver:
    """A run of its own in the store, with one checkpoint after the other."""

    def __init__(self, state: TrainState, url: str) -> None:
        """Open and claim the run."""
        self.store: ObjectStore = open_store(url)
        self.state, self.log = state, RunLog(self.store, RUN)
        self.log.append(lambda _: opened(RUN), writer=writer())
        self.log.append(lambda _: started(1), writer=writer())
        self.results: list[StagedCheckpoint | Exception] = []
        buffer = StagingBuffer(state.device)
        self.staging = Staging(self.store, self._add, self.results.append, patience_seconds=60, buffer=buffer)
        self.staging.prepare(state.live_tensors())
        self.step = 0

    def _add(self, event: StagedCheckpoint | Waiting) -> None:
        if isinstance(event, StagedCheckpoint):
            self.results.append(event)

    def save(self) -> Saved:
        """Save, and wait until it is committed."""
        watch = Watch()
        self.begin()
        watch.stopped()
        self.commit()
        saved = watch.saved()
        self.sweep()
        return saved

    def begin(self) -> None:
        """Copy and stage as the trainer does at the end of a segment."""
        self.step += 1
        tensors = self.staging.copy(self.state.live_tensors())
        document = TrainerDocument(
            version=1,
            step=self.step,
            cursor=self.state.cursor,
            learning_rate=0.0,
            versions={},
            tensors=tuple(small_tensor(record) for record in to_group("trainer", tensors).records),
        )
        target = checkpoint_target(RUN, step=self.step, attempt=1)
        checkpoint = HostCheckpoint(target=target, tensors=tensors, document=document)
        self.staging.begin(checkpoint, before=lambda: None)

    def commit(self) -> CheckpointReference:
        """Wait for the staged checkpoint and commit it."""
        self.staging.wait()
        staged = self.results[-1]
        if isinstance(staged, Exception):
            raise staged
        commit_checkpoint(self.log, staged, writer=writer(1), tokens=0, gpu_seconds=0.0)
        return CheckpointReference(
            step=staged.step, attempt=1, prefix=staged.prefix, manifest_sha256=staged.manifest_sha256
        )

    def sweep(self) -> None:
        """Take away the checkpoint before the newest, as a run does in the background, later."""
        for key in self.store.keys(checkpoint_target(RUN, step=self.step - 1, attempt=1).prefix):
            self.store.delete(key)


def tensors_of(state: TrainState) -> dict[str, torch.Tensor]:
    """Return the state as a plain state_dict."""
    return {named.name: named.tensor for named in state.live_tensors()}


def torch_save(state: TrainState, url: str) -> Saver:
    """Return torch.save into one object, with fsync where it is a file."""
    target = f"{url}/torch-save.pt"

    def save() -> Saved:
        watch = Watch()
        with fsspec.open(target, "wb", auto_mkdir=True) as file:
            torch.save(tensors_of(state), file)
            if url.startswith("file"):
                file.flush()
                os.fsync(file.fileno())
        return watch.stopped().saved()

    return save


def _writer(url: str) -> Any:
    # fsync is their default, on local files.
    if url.startswith("file"):
        return dcp.FileSystemWriter(f"{url.removeprefix('file://')}/dcp", thread_count=2, overwrite=True)
    return FsspecWriter(f"{url}/dcp", thread_count=2, sync_files=False, overwrite=True)


def distributed_save(state: TrainState, url: str) -> Saver:
    """Return torch.distributed.checkpoint.save with two writer threads."""

    def save() -> Saved:
        watch = Watch()
        with warnings.catch_warnings(action="ignore"):
            dcp.save(tensors_of(state), storage_writer=_writer(url), no_dist=True)
        return watch.stopped().saved()

    return save


def distributed_async_save(state: TrainState, url: str) -> Saver:
    """Return torch.distributed.checkpoint.async_save with a stager that keeps its memory from save to save."""
    on_accelerator = state.device.type == "cuda"
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=on_accelerator,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=on_accelerator,
        )
    )

    def save() -> Saved:
        watch = Watch()
        with warnings.catch_warnings(action="ignore"):
            written: Any = dcp.async_save(
                tensors_of(state), storage_writer=_writer(url), async_stager=stager, no_dist=True
            )
            watch.stopped()
            future: Future[Any] = written if isinstance(written, Future) else written.upload_completion
            future.result()
        return watch.saved()

    return save


def raw_write(state: TrainState, url: str) -> Saver:
    """Return what writes as many bytes as fast as it can: one file past the page cache, or PUTs by botocore alone."""
    size = state_bytes(state)
    return _raw_file(Path(url.removeprefix("file://")), size) if url.startswith("file") else _raw_puts(url, size)


def _raw_file(folder: Path, size: int) -> Saver:
    import mmap

    piece = mmap.mmap(-1, 16 << 20)
    piece.write(os.urandom(len(piece)))

    def save() -> Saved:
        watch = Watch()
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_DIRECT", 0)
        file = os.open(folder / "raw", flags, 0o600)
        for _ in range(-(-size // len(piece))):
            os.write(file, piece)
        os.fsync(file)
        os.close(file)
        return watch.stopped().saved()

    return save


def _raw_puts(url: str, size: int) -> Saver:
    import boto3

    client: Any = boto3.client("s3")
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    body = os.urandom(64 << 20)

    def save() -> Saved:
        watch = Watch()
        for number, start in enumerate(range(0, size, len(body))):
            client.put_object(Bucket=bucket, Key=f"{prefix}/raw-{number}", Body=body[: size - start])
        return watch.stopped().saved()

    return save


SAVERS: dict[str, Callable[[TrainState, str], Saver]] = {
    "plain copy": plain_copy,
    "cairn": cairn,
    "torch.save": torch_save,
    "dcp.save": distributed_save,
    "dcp.async_save": distributed_async_save,
    "raw write": raw_write,
}
