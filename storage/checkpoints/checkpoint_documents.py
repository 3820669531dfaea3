"""The JSON documents of a checkpoint: the manifest, and `trainer.json` with the small tensors."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypedDict

from cairn.storage.checkpoints.tensor_record import MAX_HEADER_BYTES, TensorDigest, TensorRecord
from cairn.storage.errors import IntegrityError
from cairn.storage.stores.document import decode

MANIFEST_VERSION = 2
TRAINER = "trainer.json"


class _Version(TypedDict):
    version: int


_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*\Z")


def _check_object(name: str, size_bytes: int) -> None:
    if not _NAME.match(name):
        raise ValueError(f"object name {name!r}: must match {_NAME.pattern}; it may not leave its folder")
    if size_bytes < 0:
        raise ValueError(f"object {name}: bytes {size_bytes}: must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestObject:
    """One payload object; `name` is a plain name inside the checkpoint's folder."""

    name: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        _check_object(self.name, self.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestShard:
    """A shard: its tensors in the order of their data, after the header; `sha256` is over header and chunk digests."""

    name: str
    bytes: int
    sha256: str
    header_bytes: int
    tensors: tuple[TensorDigest, ...]

    def __post_init__(self) -> None:
        _check_object(self.name, self.bytes)
        if not 0 <= self.header_bytes <= MAX_HEADER_BYTES + 8:
            raise ValueError(f"object {self.name}: header_bytes {self.header_bytes}: no header has this size")
        needed = self.header_bytes + sum(tensor.bytes for tensor in self.tensors)
        if self.bytes != needed:
            raise ValueError(f"object {self.name}: bytes {self.bytes}: header and tensors need {needed}")

    def placed(self) -> Iterator[tuple[TensorDigest, int]]:
        """Yield each tensor with the byte of the object at which it begins."""
        position = self.header_bytes
        for tensor in self.tensors:
            yield tensor, position
            position += tensor.bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The objects of a checkpoint; the manifest's own SHA-256 identifies the checkpoint in the log."""

    version: int
    run_id: str
    attempt: int
    step: int
    state_sha256: str
    trainer: ManifestObject
    shards: tuple[ManifestShard, ...]

    def __post_init__(self) -> None:
        if self.trainer.name != TRAINER:
            raise ValueError(f"object name {self.trainer.name!r}: the trainer document must be {TRAINER}")
        for names in ([item.name for item in self.objects], [tensor.name for tensor in self.tensors]):
            if len(set(names)) < len(names):
                raise ValueError(f"{max(names, key=names.count)!r} is named twice")

    @property
    def objects(self) -> tuple[ManifestObject | ManifestShard, ...]:
        """Every object beside the manifest."""
        return self.trainer, *self.shards

    @property
    def tensors(self) -> tuple[TensorDigest, ...]:
        """The tensors of every shard."""
        return tuple(chain.from_iterable(shard.tensors for shard in self.shards))


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Return the manifest in `data`; raise `IntegrityError` naming `where` if it is malformed or newer."""
    version = decode(data, _Version, where=where)["version"]
    if version > MANIFEST_VERSION:
        raise IntegrityError(f"{where}: version {version} is newer than {MANIFEST_VERSION}; update cairn")
    return decode(data, Manifest, where=where)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerDocument:
    """The step and everything small that the run needs to continue with the same bits."""

    version: int
    step: int
    cursor: int
    learning_rate: float
    versions: Mapping[str, str]
    tensors: tuple[TensorRecord, ...]


def small_tensor(record: TensorRecord) -> TensorRecord:
    """Return the record with a copy of its bytes, which training does not change."""
    return replace(record, data=memoryview(bytes(record.data)))
