"""Staging in the background: one checkpoint goes up while the next segment trains.

Owns the threads, which give way to training, the memory a checkpoint waits in, never overwritten while it is read,
and patience with a store that is away: it is asked again until `patience_seconds` are over, and training goes on
meanwhile, up to the end of the segment under way, because one checkpoint is all that waits in memory.
Refuses to commit anything.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from model.training.train_state import NamedTensor
from storage.checkpoints.checkpoint import (
    CheckpointTarget,
    OtherWriters,
    StagedCheckpoint,
    TensorGroup,
    UploadOptions,
    stage_checkpoint,
    stage_share,
)
from storage.checkpoints.manifest import ManifestObject
from storage.checkpoints.tensor_record import TensorRecord
from storage.checkpoints.trainer_document import TrainerDocument
from storage.errors import StorageError
from storage.stores.object_store import ObjectStore
from tasks.attempt.store_retry import run_retry_policy
from tasks.machine.placement import lower_thread_priority
from tasks.trainer.shared_staging import SharedStaging
from tasks.trainer.staging_buffer import StagingBuffer
from tasks.trainer.tensor_exchange import to_group

T = TypeVar("T")
_SIGN_SECONDS = 2.0
_UPLOADS = UploadOptions(at_once=4, thread_start=lower_thread_priority)
"""Four shards at once keep a disk or a connection busy while others are hashed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCheckpoint:
    """A train state copied to the host, on its way to the store."""

    target: CheckpointTarget
    tensors: tuple[NamedTensor, ...]
    document: TrainerDocument

    def groups(self) -> tuple[TensorGroup, ...]:
        """Return what becomes shards; worked out in the background, for training waits for the copy alone."""
        return to_group("weights", self.tensors), to_group("optimizer", self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reports:
    """Who hears what: a checkpoint is staged, nothing went up yet and why, it is given up."""

    staged: Callable[[StagedCheckpoint], None]
    waiting: Callable[[int, str, float], None]
    failed: Callable[[Exception], None]


class Staging:
    """At most one checkpoint on its way."""

    def __init__(
        self,
        store: ObjectStore,
        reports: Reports,
        *,
        patience_seconds: float,
        host_copy: StagingBuffer | None = None,
        shared: SharedStaging | None = None,
    ) -> None:
        """Start with nothing to stage; `host_copy` is this object's from now on. Several ranks share the work."""
        self._shared = shared
        self._store, self._reports, self._retry_policy = store, reports, run_retry_policy(patience_seconds)
        self._host_copy = host_copy or StagingBuffer(torch.device("cpu"))
        self._thread: threading.Thread | None = None
        self._step = 0

    def prepare(self, tensors: Sequence[NamedTensor]) -> None:
        """Make the memory that copies of these tensors will need, in the background: call it before training."""
        shared = self._shared
        self._host_copy.prepare([named for named in tensors if shared is None or shared.is_own(named.name)])

    def copy(self, tensors: Sequence[NamedTensor]) -> tuple[NamedTensor, ...]:
        """Return host copies, which stay as they are until the next call; waits for a checkpoint still being read."""
        self.wait()
        return (
            self._host_copy.take(tensors)
            if self._shared is None
            else self._host_copy.take(tensors, self._shared.is_own)
        )

    def begin(self, checkpoint: HostCheckpoint, before: Callable[[], None]) -> None:
        """Wait for the one under way, then stage `checkpoint` in the background, calling `before` there first."""
        self.wait()
        self._step = checkpoint.document.step
        self._thread = threading.Thread(target=self._run, args=(checkpoint, before), name="staging")
        self._thread.start()

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint is still on its way up, so that its memory is being read."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint under way is staged, showing signs of life."""
        started = time.monotonic()
        while self._thread is not None and self.is_under_way:
            self._thread.join(_SIGN_SECONDS)
            self._reports.waiting(self._step, "", time.monotonic() - started)

    def _run(self, checkpoint: HostCheckpoint, before: Callable[[], None]) -> None:
        lower_thread_priority()
        shared = self._shared
        try:
            with ThreadPoolExecutor(1, "digest", initializer=lower_thread_priority) as background:
                if shared is None:
                    self._complete(checkpoint, before, None)
                elif shared.ranks.is_first:
                    records = [*_payload(checkpoint), *checkpoint.document.records()]
                    digest = background.submit(shared.digest, records).result
                    self._complete(checkpoint, before, shared.others(checkpoint.document.step, digest))
                else:
                    handing_over = background.submit(shared.hand_over, _payload(checkpoint))
                    objects = self._with_retries(checkpoint, partial(self._stage_share, checkpoint, shared))
                    shared.tell_written(checkpoint.document.step, objects)
                    handing_over.result()
        except Exception as error:
            self._reports.failed(error)

    def _complete(self, checkpoint: HostCheckpoint, before: Callable[[], None], others: OtherWriters | None) -> None:
        def stage() -> StagedCheckpoint:
            before()
            return self._stage(checkpoint, others)

        self._reports.staged(self._with_retries(checkpoint, stage))

    def _with_retries(self, checkpoint: HostCheckpoint, stage: Callable[[], T]) -> T:
        def report(error: StorageError, seconds: float) -> None:
            self._reports.waiting(checkpoint.document.step, str(error), seconds)

        return self._retry_policy.call(stage, on_retry=report)

    def _stage_share(self, checkpoint: HostCheckpoint, shared: SharedStaging) -> tuple[ManifestObject, ...]:
        return stage_share(
            self._store,
            checkpoint.target.prefix,
            checkpoint.groups(),
            writer=shared.ranks.rank,
            writers=shared.ranks.size,
            uploads=_UPLOADS,
        )

    def _stage(self, checkpoint: HostCheckpoint, others: OtherWriters | None) -> StagedCheckpoint:
        return stage_checkpoint(
            self._store,
            checkpoint.target,
            checkpoint.groups(),
            checkpoint.document,
            uploads=_UPLOADS,
            others=others,
        )


def _payload(checkpoint: HostCheckpoint) -> list[TensorRecord]:
    return [record for group in checkpoint.groups() for record in group.records]
