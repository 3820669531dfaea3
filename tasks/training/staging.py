"""Staging in the background: one checkpoint goes up while the next segment trains.

Owns the threads, which give way to training, the memory a checkpoint waits in, never overwritten while it is read,
and patience with a store that is away: it is asked again until `patience_seconds` are over, and training goes on
meanwhile, up to the end of the segment under way, because one checkpoint is all that waits in memory.
Refuses to commit anything.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from model.train_state import NamedTensor
from storage.checkpoints.checkpoint import StagedCheckpoint, TensorGroup, stage_checkpoint
from storage.checkpoints.trainer_document import TrainerDocument
from storage.errors import StorageError
from storage.stores.object_store import ObjectStore
from tasks.store_patience import run_patience
from tasks.training.background_priority import give_way
from tasks.training.host_copy import HostCopy

_SIGN_SECONDS = 2.0
_TRANSFERS = 4
"""Shards written at once: enough to keep a disk or a connection busy while others are hashed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCheckpoint:
    """A train state copied to the host, on its way to the store."""

    run_id: str
    attempt: int
    prefix: str
    groups: tuple[TensorGroup, ...]
    document: TrainerDocument


@dataclass(frozen=True, kw_only=True, slots=True)
class Reports:
    """Who hears what: a checkpoint is staged, nothing went up yet and why, it is given up."""

    staged: Callable[[StagedCheckpoint], None]
    waiting: Callable[[int, str, float], None]
    failed: Callable[[Exception], None]


class Staging:
    """At most one checkpoint on its way."""

    def __init__(
        self, store: ObjectStore, reports: Reports, *, patience_seconds: float, host_copy: HostCopy | None = None
    ) -> None:
        """Start with nothing to stage; `host_copy` is this object's from now on."""
        self._store, self._reports, self._patience = store, reports, run_patience(patience_seconds)
        self._host_copy = host_copy or HostCopy(torch.device("cpu"))
        self._thread: threading.Thread | None = None
        self._step = 0

    def prepare(self, tensors: Sequence[NamedTensor]) -> None:
        """Make the memory that copies of these tensors will need, in the background: call it before training."""
        self._host_copy.prepare(tensors)

    def copy(self, tensors: Sequence[NamedTensor]) -> tuple[NamedTensor, ...]:
        """Return host copies, which stay as they are until the next call; waits for a checkpoint still being read."""
        self.wait()
        return self._host_copy.take(tensors)

    def begin(self, checkpoint: HostCheckpoint, before: Callable[[], None]) -> None:
        """Wait for the one under way, then stage `checkpoint` in the background, calling `before` there first."""
        self.wait()
        self._step = checkpoint.document.step
        self._thread = threading.Thread(target=self._run, args=(checkpoint, before), name="staging")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint under way is staged, showing signs of life."""
        started = time.monotonic()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_SIGN_SECONDS)
            self._reports.waiting(self._step, "", time.monotonic() - started)

    def _run(self, checkpoint: HostCheckpoint, before: Callable[[], None]) -> None:
        give_way()
        try:
            self._reports.staged(self._patiently(checkpoint, before))
        except Exception as error:
            self._reports.failed(error)

    def _patiently(self, checkpoint: HostCheckpoint, before: Callable[[], None]) -> StagedCheckpoint:
        def stage() -> StagedCheckpoint:
            before()
            return self._stage(checkpoint)

        def told(error: StorageError, seconds: float) -> None:
            self._reports.waiting(checkpoint.document.step, str(error), seconds)

        return self._patience.ask(stage, told=told)

    def _stage(self, checkpoint: HostCheckpoint) -> StagedCheckpoint:
        return stage_checkpoint(
            self._store,
            run_id=checkpoint.run_id,
            attempt=checkpoint.attempt,
            prefix=checkpoint.prefix,
            groups=checkpoint.groups,
            trainer=checkpoint.document,
            uploads=_TRANSFERS,
            thread_start=give_way,
        )
