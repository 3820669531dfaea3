"""Stages checkpoints in background threads of low priority while training goes on.

One at a time: its memory is not overwritten before. For a store that is away it retries `patience_seconds` long.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch

from cairn.model.training.parallel import Ranks
from cairn.model.training.train_state import NamedTensor
from cairn.storage.checkpoints.checkpoint import CheckpointTarget, UploadOptions, stage_checkpoint, stage_share
from cairn.storage.checkpoints.payload import ManifestShard, TrainerDocument
from cairn.storage.errors import StorageError
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.stores.object_store import ObjectStore, run_retry_policy
from cairn.tasks.trainer import rank_store, staging_buffer, trainer_protocol
from cairn.tasks.trainer.tensor_exchange import to_group

_HEARTBEAT_SECONDS = 2.0
_LOST_POLL_SECONDS, _SLOWER = 0.1, 10.0
"""Another writer hangs if it takes so many times as long as the first one has, and as the store may be away."""
_UPLOADS = UploadOptions(at_once=4, thread_start=staging_buffer.lower_thread_priority)
"""Four shards at once keep a disk or a connection busy, and four threads hash beside them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCheckpoint:
    """A train state copied to the host."""

    target: CheckpointTarget
    tensors: tuple[NamedTensor, ...]
    document: TrainerDocument


def assign_writers(tensors: Sequence[NamedTensor], count: int) -> dict[str, int]:
    """Return which rank writes each tensor, the same on all: in name order, of equal bytes, rank 0 the document's."""
    payload = sorted((named for named in tensors if named.group != "trainer"), key=lambda named: named.name)
    total, before = max(1, sum(named.tensor.nbytes for named in payload)), 0
    writers = {named.name: 0 for named in tensors}
    for named in payload:
        writers[named.name] = min(count - 1, (before + named.tensor.nbytes // 2) * count // total)
        before += named.tensor.nbytes
    return writers


class WriterLost(Exception):
    """A rank was lost before its part of a checkpoint was written."""


class SharedStaging:
    """This rank's part in staging checkpoints that several ranks write, and the others' after one is lost.

    Each rank writes and hashes whole tensors; rank 0 gets their names, sizes and digests, and writes the manifest. The
    writers are those who took part in the newest round, so that all agree on them.
    """

    def __init__(self, ranks: Ranks, rendezvous: rank_store.Rendezvous, tensors: Sequence[NamedTensor]) -> None:
        """Take the tensors of a train state, which are assigned to ranks for each checkpoint."""
        self.ranks, self._rendezvous = ranks, rendezvous
        self._tensors, self._own = tuple(tensors), ranks.members[ranks.rank]
        self._writers, self._members = dict[str, int](), tuple[int, ...]()

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that write the next checkpoint."""
        return self.ranks.position.members or self.ranks.members

    @property
    def number(self) -> int:
        """This rank's number among the writers."""
        return self.members.index(self._own)

    def writer(self, name: str) -> int:
        """Return the number of the writer of the tensor."""
        if self._members != self.members:
            self._members = self.members
            self._writers = assign_writers(self._tensors, len(self._members))
        return self._writers[name]

    def publish_shards(self, name: str, shards: Sequence[ManifestShard]) -> None:
        """Tell rank 0 the shards that this rank wrote for the checkpoint of this name."""
        self._rendezvous.put(f"staged/{name}/{self._own}", msgspec.json.encode(shards))

    def other_shards(
        self, name: str, writers: Sequence[int], *, limit_seconds: float = math.inf
    ) -> tuple[ManifestShard, ...]:
        """Wait for what the other writers wrote for the checkpoint of this name; raises WriterLost. For rank 0.

        Those that take longer than the limit hang, and their launchers are asked to kill them.
        """
        every, deadline = list[ManifestShard](), time.monotonic() + limit_seconds
        for rank in writers[1:]:
            key, is_lost = f"staged/{name}/{rank}", False
            while not (document := self._rendezvous.get(key, timeout_seconds=_LOST_POLL_SECONDS)):
                if is_lost:
                    raise WriterLost(f"rank {rank} was lost before it had written its part")
                is_lost = self._rendezvous.has_lost(rank)
                if time.monotonic() > deadline:
                    self._rendezvous.put("late", msgspec.json.encode([rank]))
            every += msgspec.json.decode(document, type=tuple[ManifestShard, ...])
        return tuple(every)


class Staging:
    """Stages at most one checkpoint at a time."""

    def __init__(
        self,
        store: ObjectStore,
        send: Callable[[trainer_protocol.Event], None],
        on_failed: Callable[[Exception], None],
        *,
        patience_seconds: float,
        buffer: staging_buffer.StagingBuffer | None = None,
        shared: SharedStaging | None = None,
    ) -> None:
        """Send each checkpoint that is staged, or waits; `buffer` is owned, `shared` is this rank's part of several."""
        self._shared = shared
        self._writer: Callable[[str], int] = (lambda _: 0) if shared is None else shared.writer
        self._store, self._patience_seconds = store, patience_seconds
        self._retry_policy = run_retry_policy(patience_seconds)
        self._send, self._on_failed = send, on_failed
        self._buffer = buffer or staging_buffer.StagingBuffer(torch.device("cpu"))
        self._thread: threading.Thread | None = None
        self.step = 0

    def prepare(self, tensors: Sequence[NamedTensor]) -> None:
        """Allocate the memory for copies of these tensors in the background."""
        self._buffer.prepare([named for named in tensors if self._writer(named.name) == self._number])

    def copy(self, tensors: Sequence[NamedTensor]) -> tuple[NamedTensor, ...]:
        """Wait for the checkpoint on its way, then return host copies, which are valid until the next call."""
        self.wait()
        return self._buffer.copy(tensors, self._writer, self._number)

    def begin(self, checkpoint: HostCheckpoint, before: Callable[[], None]) -> None:
        """Wait for the checkpoint on its way, then call `before` and stage `checkpoint` in the background."""
        self.wait()
        self.step = checkpoint.document.step
        shared = self._shared
        members, rounds = ((0,), 0) if shared is None else (shared.members, shared.ranks.position.rounds)
        part = f"{self.step}-{rounds}", self._number, members
        self._thread = threading.Thread(target=self._run, args=(checkpoint, before, *part), name="staging")
        self._thread.start()

    @property
    def _number(self) -> int:
        return 0 if self._shared is None else self._shared.number

    @property
    def is_in_progress(self) -> bool:
        """Whether a checkpoint is still being uploaded, so that its memory is in use."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, limit_seconds: float = math.inf) -> bool:
        """Wait until the checkpoint on its way is staged, sending `Waiting` every 2 s as a sign of life.

        Returns False if it still is not after `limit_seconds`.
        """
        started, waited_seconds = time.monotonic(), 0.0
        while self._thread is not None and self.is_in_progress and waited_seconds < limit_seconds:
            self._thread.join(min(_HEARTBEAT_SECONDS, limit_seconds - waited_seconds))
            waited_seconds = time.monotonic() - started
            self._send(trainer_protocol.Waiting(step=self.step, why="", seconds=waited_seconds))
        return not self.is_in_progress

    def _run(
        self, checkpoint: HostCheckpoint, before: Callable[[], None], name: str, number: int, members: Sequence[int]
    ) -> None:
        staging_buffer.lower_thread_priority()
        shared, target, document = self._shared, checkpoint.target, checkpoint.document
        began = time.monotonic()

        def on_retry(error: StorageError, seconds: float) -> None:
            self._send(trainer_protocol.Waiting(step=document.step, why=str(error), seconds=seconds))

        policy = replace(self._retry_policy, on_retry=on_retry)

        def complete() -> StagedCheckpoint:
            before()
            return upload()

        def other_shards() -> tuple[ManifestShard, ...]:
            assert shared is not None
            limit = self._patience_seconds + _SLOWER * (time.monotonic() - began)
            return shared.other_shards(name, members, limit_seconds=limit)

        try:
            groups = to_group("weights", checkpoint.tensors), to_group("optimizer", checkpoint.tensors)
            if shared is not None and number:
                share = partial(stage_share, self._store, target.prefix, groups, writer=number)
                shards = policy.call(share, writers=len(members), uploads=_UPLOADS)
                shared.publish_shards(name, shards)
                return
            upload = partial(stage_checkpoint, self._store, target, groups, document, uploads=_UPLOADS)
            if shared is not None:
                upload = partial(upload, writers=len(members), others=other_shards)
            self._send(policy.call(complete))
        except WriterLost as lost:
            self._send(trainer_protocol.CheckpointDropped(step=document.step, why=str(lost)))
        except Exception as error:
            self._on_failed(error)
