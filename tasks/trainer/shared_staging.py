"""One checkpoint written by several ranks: who writes which tensor, and how it becomes one manifest with one digest.

Owns the split and what passes between the ranks meanwhile. Shards hold whole tensors, so a checkpoint says nothing of
how many wrote it and any number can read it. The digest runs over all bytes in name order: rank 0 is sent what others
hold, a tensor at a time, in the background. Refuses to know threads and patience.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import torch

from model.training.parallel import Ranks
from model.training.train_state import NamedTensor
from storage.checkpoints.checkpoint import OtherWriters
from storage.checkpoints.manifest import ManifestObject
from storage.checkpoints.shard_transfer import in_name_order
from storage.checkpoints.tensor_record import TensorRecord, state_sha256
from tasks.trainer.rendezvous import Rendezvous
from tasks.trainer.tensor_exchange import to_record


def writers_of(tensors: Sequence[NamedTensor], count: int) -> dict[str, int]:
    """Return which of `count` ranks writes which tensor: contiguous in name order, about as many bytes each.

    What belongs to the trainer's document is rank 0's. Every rank finds the same.
    """
    payload = sorted((named for named in tensors if named.group != "trainer"), key=lambda named: named.name)
    total, before = max(1, sum(named.tensor.nbytes for named in payload)), 0
    writers = {named.name: 0 for named in tensors}
    for named in payload:
        writers[named.name] = min(count - 1, (before + named.tensor.nbytes // 2) * count // total)
        before += named.tensor.nbytes
    return writers


class SharedStaging:
    """This rank's part in staging what all ranks hold."""

    def __init__(self, ranks: Ranks, meeting: Rendezvous, tensors: Sequence[NamedTensor]) -> None:
        """Split the tensors of a train state; the split holds for every checkpoint of the attempt."""
        self.ranks, self._meeting = ranks, meeting
        self._writers = writers_of(tensors, ranks.size)
        self._theirs = sorted(
            (named for named in tensors if self._writers[named.name] != 0), key=lambda named: named.name
        )

    def is_own(self, name: str) -> bool:
        """Whether this rank writes the tensor."""
        return self._writers[name] == self.ranks.rank

    def digest(self, own: Sequence[TensorRecord]) -> str:
        """Return the digest of the whole state; on rank 0, once for each checkpoint, while the others `hand_over`."""
        return state_sha256(in_name_order(sorted(own, key=lambda record: record.name), self._received()))

    def hand_over(self, own: Sequence[TensorRecord]) -> None:
        """Send rank 0 what it has to digest; for every other rank, once for each checkpoint."""
        for record in sorted(own, key=lambda record: record.name):
            if record.data.nbytes:
                self.ranks.send_to_first(torch.frombuffer(record.data, dtype=torch.uint8))

    def tell_written(self, step: int, objects: Sequence[ManifestObject]) -> None:
        """Let rank 0 know what this rank has written for the checkpoint of `step`."""
        self._meeting.leave(_key(step, self.ranks.rank), msgspec.json.encode(objects))

    def others(self, step: int, digest: Callable[[], str]) -> OtherWriters:
        """Return what rank 0 asks of the others to complete the checkpoint of `step`."""
        return OtherWriters(count=self.ranks.size - 1, digest=digest, written=partial(self._written_by_others, step))

    def _written_by_others(self, step: int) -> tuple[ManifestObject, ...]:
        names = [_key(step, rank) for rank in range(1, self.ranks.size)]
        left = [self._meeting.take(name) or b"[]" for name in names]
        return tuple(item for data in left for item in msgspec.json.decode(data, type=tuple[ManifestObject, ...]))

    def _received(self) -> Iterator[TensorRecord]:
        for named in self._theirs:
            buffer = torch.empty(named.tensor.shape, dtype=named.tensor.dtype)
            if buffer.nbytes:
                flat = buffer.reshape(-1).view(torch.uint8)  # its shape -> (bytes,)
                self.ranks.receive_from(self._writers[named.name], flat)
            yield to_record(named.name, buffer)


def _key(step: int, rank: int) -> str:
    return f"staged/{step}/{rank}"
