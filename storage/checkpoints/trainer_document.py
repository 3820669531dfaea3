"""`trainer.json`: the small part of a train state, readable with `cat`.

Owns step, cursor, versions and the small tensors (RNG, scaler, counters) as base64.
Refuses to know what a generator is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from storage.checkpoints.tensor_record import TensorRecord
from storage.stores.document import decode, encode


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallTensor:
    """A tensor small enough to live in JSON."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerDocument:
    """Where the run stands, and everything small it needs to go on bit for bit."""

    version: int
    step: int
    cursor: int
    learning_rate: float
    versions: Mapping[str, str]
    tensors: tuple[SmallTensor, ...]

    def records(self) -> tuple[TensorRecord, ...]:
        """Return the small tensors as records."""
        return tuple(
            TensorRecord(name=t.name, dtype=t.dtype, shape=t.shape, data=memoryview(t.data)) for t in self.tensors
        )


def small_tensor(record: TensorRecord) -> SmallTensor:
    """Return the record with its bytes copied, for JSON."""
    return SmallTensor(name=record.name, dtype=record.dtype, shape=record.shape, data=bytes(record.data))


def encode_trainer_document(document: TrainerDocument) -> bytes:
    """Return the document's bytes."""
    return encode(document)


def decode_trainer_document(data: bytes, *, where: str) -> TrainerDocument:
    """Return the document in `data`; raise `IntegrityError` naming `where` on anything malformed."""
    return decode(data, TrainerDocument, where=where)
