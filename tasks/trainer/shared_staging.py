"""One checkpoint written by several ranks: which rank writes which tensor, and how one manifest and digest result.

Shards hold whole tensors, so any number of processes can read them. The digest covers all bytes in name order: the
other ranks send theirs to rank 0 in the background, one tensor at a time.
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


def assign_writers(tensors: Sequence[NamedTensor], count: int) -> dict[str, int]:
    """Return which of `count` ranks writes each tensor: contiguous in name order, about equal bytes.

    Rank 0 writes the tensors of the trainer document. Every rank computes the same assignment.
    """
    payload = sorted((named for named in tensors if named.group != "trainer"), key=lambda named: named.name)
    total, before = max(1, sum(named.tensor.nbytes for named in payload)), 0
    writers = {named.name: 0 for named in tensors}
    for named in payload:
        writers[named.name] = min(count - 1, (before + named.tensor.nbytes // 2) * count // total)
        before += named.tensor.nbytes
    return writers


class SharedStaging:
    """This rank's part in staging a checkpoint of all ranks."""

    def __init__(self, ranks: Ranks, rendezvous: Rendezvous, tensors: Sequence[NamedTensor]) -> None:
        """Assign the tensors of a train state to ranks, for every checkpoint of the attempt."""
        self.ranks, self._rendezvous = ranks, rendezvous
        self._writers = assign_writers(tensors, ranks.size)
        self._theirs = sorted(
            (named for named in tensors if self._writers[named.name] != 0), key=lambda named: named.name
        )

    def is_own(self, name: str) -> bool:
        """Whether this rank writes the tensor."""
        return self._writers[name] == self.ranks.rank

    def digest(self, own: Sequence[TensorRecord]) -> str:
        """Return the digest of the whole state; called by rank 0 for each checkpoint, while the others `send_own`."""
        return state_sha256(in_name_order(sorted(own, key=lambda record: record.name), self._received()))

    def send_own(self, own: Sequence[TensorRecord]) -> None:
        """Send this rank's tensors to rank 0 for the digest; every other rank calls it once per checkpoint."""
        for record in sorted(own, key=lambda record: record.name):
            if record.data.nbytes:
                self.ranks.send_to_first(torch.frombuffer(record.data, dtype=torch.uint8))

    def publish_objects(self, step: int, objects: Sequence[ManifestObject]) -> None:
        """Tell rank 0 the objects that this rank wrote for the checkpoint of `step`."""
        self._rendezvous.put(_key(step, self.ranks.rank), msgspec.json.encode(objects))

    def other_writers(self, step: int, digest: Callable[[], str]) -> OtherWriters:
        """Return the part of the other ranks in the checkpoint of `step`, for rank 0."""
        return OtherWriters(count=self.ranks.size - 1, digest=digest, written=partial(self._other_objects, step))

    def _other_objects(self, step: int) -> tuple[ManifestObject, ...]:
        names = [_key(step, rank) for rank in range(1, self.ranks.size)]
        documents = [self._rendezvous.get(name) or b"[]" for name in names]
        return tuple(item for data in documents for item in msgspec.json.decode(data, type=tuple[ManifestObject, ...]))

    def _received(self) -> Iterator[TensorRecord]:
        for named in self._theirs:
            buffer = torch.empty(named.tensor.shape, dtype=named.tensor.dtype)
            if buffer.nbytes:
                flat = buffer.reshape(-1).view(torch.uint8)  # its shape -> (bytes,)
                self.ranks.receive_from(self._writers[named.name], flat)
            yield to_record(named.name, buffer)


def _key(step: int, rank: int) -> str:
    return f"staged/{step}/{rank}"
