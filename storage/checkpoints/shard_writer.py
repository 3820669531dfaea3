"""Writes tensors as safetensors shards; every byte is hashed once, on its way to the store."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from storage.checkpoints.checkpoint_documents import ManifestShard
from storage.checkpoints.tensor_record import TensorRecord, chunks_of, with_digests
from storage.checkpoints.tensor_shard import shard_header
from storage.stores.object_store import ObjectStore

_PIECE_BYTES = 1024 * 1024
"""Small enough to be in the processor's cache when the store takes it, after it was hashed."""


def write_shard(store: ObjectStore, prefix: str, name: str, records: Sequence[TensorRecord]) -> ManifestShard:
    """Write one shard and return what the manifest says of it."""
    header = shard_header(records)
    digests: dict[str, list[bytes]] = {record.name: [] for record in records}

    def pieces() -> Iterator[bytes | memoryview]:
        yield header
        for record in records:
            for chunk in chunks_of(record.data):
                digest = hashlib.sha256()
                for begin in range(0, chunk.nbytes, _PIECE_BYTES):
                    digest.update(piece := chunk[begin : begin + _PIECE_BYTES])
                    yield piece
                digests[record.name].append(digest.digest())

    size_bytes = store.write_stream(f"{prefix}/{name}", pieces())
    tensors = tuple(with_digests(record, digests[record.name]) for record in records)
    return ManifestShard(
        name=name,
        bytes=size_bytes,
        sha256=shard_sha256(header, (tensor.chunks for tensor in tensors)),
        header_bytes=len(header),
        tensors=tensors,
    )


def shard_sha256(header: bytes | memoryview, digests: Iterable[bytes]) -> str:
    """Return the hex digest of a shard: over its header, then the digests of its chunks."""
    digest = hashlib.sha256(header)
    for joined in digests:
        digest.update(joined)
    return digest.hexdigest()


def cut_shards(records: Iterable[TensorRecord], shard_bytes: int) -> list[list[TensorRecord]]:
    """Return the records in name order, cut into shards of at most `shard_bytes` unless one record is larger."""
    shards: list[list[TensorRecord]] = [[]]
    filled = 0
    for record in sorted(records, key=lambda record: record.name):
        if filled and filled + record.bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(record)
        filled += record.bytes
    return shards
