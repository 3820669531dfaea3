"""The JSON documents of a checkpoint: the manifest (sizes and SHA-256), and `trainer.json` with its small tensors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from storage.checkpoints.tensor_record import TensorRecord
from storage.errors import IntegrityError
from storage.stores.document import decode

MANIFEST_VERSION = 1
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestObject:
    """One payload object; `name` is a plain name inside the checkpoint's folder."""

    name: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(f"object name {self.name!r}: must match {_NAME.pattern}; it may not leave its folder")
        if self.bytes < 0:
            raise ValueError(f"object {self.name}: bytes {self.bytes}: must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The objects of a checkpoint; the manifest's own SHA-256 identifies the checkpoint in the log."""

    version: int
    run_id: str
    attempt: int
    step: int
    state_sha256: str
    objects: tuple[ManifestObject, ...]


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Return the manifest in `data`; raise `IntegrityError` naming `where` if it is malformed or newer."""
    manifest = decode(data, Manifest, where=where)
    if manifest.version > MANIFEST_VERSION:
        raise IntegrityError(f"{where}: version {manifest.version} is newer than {MANIFEST_VERSION}; update cairn")
    return manifest


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
