"""Stages checkpoints in background threads of low priority while training goes on.

One checkpoint is on its way at a time; its memory is not overwritten before. While the store is unavailable, staging
retries until `patience_seconds` are over, and training continues up to the end of the current segment.
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
from storage.checkpoints.tensor_record import TensorRecord
from storage.checkpoints.trainer_document import TrainerDocument
from storage.errors import StorageError
from storage.stores.object_store import ObjectStore
from tasks.attempt.store_retry import run_retry_policy
from tasks.trainer.shared_staging import SharedStaging
from tasks.trainer.staging_buffer import StagingBuffer, lower_thread_priority
from tasks.trainer.tensor_exchange import to_group

T = TypeVar("T")
_HEARTBEAT_SECONDS = 2.0
_UPLOADS = UploadOptions(at_once=4, thread_start=lower_thread_priority)
"""Four shards at once keep a disk or a connection busy while others are hashed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCheckpoint:
    """A train state copied to the host."""

    target: CheckpointTarget
    tensors: tuple[NamedTensor, ...]
    document: TrainerDocument

    def groups(self) -> tuple[TensorGroup, ...]:
        """Return the tensors that become shards; called in the background, to keep training's wait short."""
        return to_group("weights", self.tensors), to_group("optimizer", self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagingCallbacks:
    """Called when a checkpoint is staged; with (step, why, seconds) while it waits; and with the error if it failed."""

    on_staged: Callable[[StagedCheckpoint], None]
    on_waiting: Callable[[int, str, float], None]
    on_failed: Callable[[Exception], None]


class Staging:
    """Stages at most one checkpoint at a time."""

    def __init__(
        self,
        store: ObjectStore,
        callbacks: StagingCallbacks,
        *,
        patience_seconds: float,
        buffer: StagingBuffer | None = None,
        shared: SharedStaging | None = None,
    ) -> None:
        """Own `buffer` from now on; `shared` is this rank's part if several ranks stage together."""
        self._shared = shared
        self._store, self._callbacks, self._retry_policy = store, callbacks, run_retry_policy(patience_seconds)
        self._buffer = buffer or StagingBuffer(torch.device("cpu"))
        self._thread: threading.Thread | None = None
        self._step = 0

    def prepare(self, tensors: Sequence[NamedTensor]) -> None:
        """Allocate the memory for copies of these tensors in the background."""
        shared = self._shared
        self._buffer.prepare([named for named in tensors if shared is None or shared.is_own(named.name)])

    def copy(self, tensors: Sequence[NamedTensor]) -> tuple[NamedTensor, ...]:
        """Wait for the checkpoint on its way, then return host copies, which are valid until the next call."""
        self.wait()
        if self._shared is None:
            return self._buffer.copy(tensors)
        return self._buffer.copy(tensors, self._shared.is_own)

    def begin(self, checkpoint: HostCheckpoint, before: Callable[[], None]) -> None:
        """Wait for the checkpoint on its way, then call `before` and stage `checkpoint` in the background."""
        self.wait()
        self._step = checkpoint.document.step
        self._thread = threading.Thread(target=self._run, args=(checkpoint, before), name="staging")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint on its way is staged, calling `on_waiting` every 2 s as a sign of life."""
        started = time.monotonic()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_HEARTBEAT_SECONDS)
            self._callbacks.on_waiting(self._step, "", time.monotonic() - started)

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
                    self._complete(checkpoint, before, shared.other_writers(checkpoint.document.step, digest))
                else:
                    sending = background.submit(shared.send_own, _payload(checkpoint))
                    self._stage_share(checkpoint, shared)
                    sending.result()
        except Exception as error:
            self._callbacks.on_failed(error)

    def _complete(self, checkpoint: HostCheckpoint, before: Callable[[], None], others: OtherWriters | None) -> None:
        def stage() -> StagedCheckpoint:
            before()
            return stage_checkpoint(
                self._store,
                checkpoint.target,
                checkpoint.groups(),
                checkpoint.document,
                uploads=_UPLOADS,
                others=others,
            )

        self._callbacks.on_staged(self._with_retries(checkpoint, stage))

    def _stage_share(self, checkpoint: HostCheckpoint, shared: SharedStaging) -> None:
        ranks, prefix, groups = shared.ranks, checkpoint.target.prefix, checkpoint.groups()
        stage = partial(
            stage_share, self._store, prefix, groups, writer=ranks.rank, writers=ranks.size, uploads=_UPLOADS
        )
        shared.publish_objects(checkpoint.document.step, self._with_retries(checkpoint, stage))

    def _with_retries(self, checkpoint: HostCheckpoint, stage: Callable[[], T]) -> T:
        def report(error: StorageError, seconds: float) -> None:
            self._callbacks.on_waiting(checkpoint.document.step, str(error), seconds)

        return self._retry_policy.call(stage, on_retry=report)


def _payload(checkpoint: HostCheckpoint) -> list[TensorRecord]:
    return [record for group in checkpoint.groups() for record in group.records]
