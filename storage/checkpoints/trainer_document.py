"""`trainer.json`: the small part of a train state, with its small tensors (RNG, scaler, counters) in base64."""

from collections.abc import Mapping
from dataclasses import dataclass

from storage.checkpoints.tensor_record import TensorRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallTensor:
    """A tensor small enough for JSON."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerDocument:
    """The step and everything small that the run needs to continue with the same bits."""

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
    """Return the record with a copy of its bytes, for JSON."""
    return SmallTensor(name=record.name, dtype=record.dtype, shape=record.shape, data=bytes(record.data))
