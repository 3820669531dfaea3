"""Writes the files of a snapshot in bounded memory: token shards, document index, rejected documents, tokenizer."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from model.data.tokenizer import Tokenizer
from storage.snapshots.data_snapshot import DOCUMENTS, REJECTED, TOKENIZER
from storage.snapshots.document_index import (
    SPLITS,
    DocumentIndexWriter,
    DocumentRow,
    RejectedRow,
    RowWriter,
    SplitName,
    write_rejected,
)
from storage.snapshots.snapshot_manifest import (
    SNAPSHOT_VERSION,
    RejectedCount,
    SnapshotGroup,
    SnapshotManifest,
    SnapshotSource,
    SnapshotSplits,
    SplitSize,
)
from storage.snapshots.token_shard import ShardSchema, ShardWriter
from storage.stores.document import project
from tasks.data.document import Source


class SnapshotWriter:
    """Context manager over the open files of a snapshot, which counts their content."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, shard_tokens: int) -> None:
        self._folder, self._tokenizer, self._shard_tokens = folder, tokenizer, shard_tokens
        self._stack = ExitStack()
        self._rejects: RowWriter | None = None
        self._rejected = Counter[str]()
        self.documents, self.tokens, self.bytes = Counter[SplitName](), Counter[SplitName](), Counter[SplitName]()

    def __enter__(self) -> "SnapshotWriter":
        (self._folder / TOKENIZER).write_bytes(self._tokenizer.to_json().encode("utf-8"))
        self._index = self._stack.enter_context(DocumentIndexWriter(self._folder / DOCUMENTS))
        schema = ShardSchema(tokenizer_sha256=self._tokenizer.sha256, vocab_size=self._tokenizer.vocab_size)
        self._shards = {
            split: self._stack.enter_context(ShardWriter(self._folder, split, schema, shard_tokens=self._shard_tokens))
            for split in SPLITS
        }
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def add_tokens(self, split: SplitName, tokens: NDArray[Any]) -> None:
        """Append tokens (N,) to a split; raises StorageError for an id outside the vocabulary."""
        self._shards[split].append(tokens)

    def add_document(self, split: SplitName, row: DocumentRow) -> None:
        """Append a document to the index; its tokens are added separately, in the same order."""
        self._index.append(row)
        self.documents[split] += 1
        self.tokens[split] += row.tokens
        self.bytes[split] += row.bytes

    def add_rejected(self, row: RejectedRow) -> None:
        """Append a rejected document; the file exists only if there are some."""
        if self._rejects is None:
            self._rejects = self._stack.enter_context(write_rejected(self._folder / REJECTED))
        self._rejects.append(row)
        self._rejected[row.kind] += 1

    def manifest(
        self, sources: Iterable[SnapshotSource], *, val_fraction: float, groups: tuple[SnapshotGroup, ...] = ()
    ) -> SnapshotManifest:
        """Return the manifest without objects."""
        return SnapshotManifest(
            version=SNAPSHOT_VERSION,
            tokenizer_sha256=self._tokenizer.sha256,
            vocab_size=self._tokenizer.vocab_size,
            end_of_text_id=self._tokenizer.end_of_text_id,
            val_fraction=val_fraction,
            splits=SnapshotSplits(train=self._size("train"), val=self._size("val")),
            sources=tuple(sources),
            rejected=tuple(RejectedCount(kind=kind, documents=n) for kind, n in sorted(self._rejected.items())),
            groups=groups or msgspec.UNSET,
        )

    def _size(self, split: SplitName) -> SplitSize:
        return SplitSize(documents=self.documents[split], tokens=self.tokens[split], bytes=self.bytes[split])


def assemble(
    folder: Path,
    batches: Iterable[pa.RecordBatch],
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    *,
    val_fraction: float,
    shard_tokens: int,
) -> SnapshotManifest:
    """Write the batches of parts as a snapshot into `folder`; returns its manifest without objects."""
    documents, tokens = Counter[str](), Counter[tuple[str, SplitName]]()
    with SnapshotWriter(folder, tokenizer, shard_tokens=shard_tokens) as writer:
        for batch in batches:
            _add_batch(writer, batch, documents, tokens)
    return writer.manifest(
        (project(item, SnapshotSource, documents=documents[item.name]) for item in sources),
        val_fraction=val_fraction,
        groups=_groups(sources, tokens),
    )


def _add_batch(
    writer: SnapshotWriter, batch: pa.RecordBatch, documents_of: Counter[str], tokens_of: Counter[tuple[str, SplitName]]
) -> None:
    ids = batch.column("ids")
    counts = np.diff(ids.offsets.to_numpy())
    splits = batch.column("split").to_numpy(zero_copy_only=False)
    for split in SPLITS:
        writer.add_tokens(split, ids.values.to_numpy()[np.repeat(splits == split, counts)])
    names = ("source", "offset_bytes", "bytes", "split", "sha256", "kind", "detail")
    columns = [batch.column(name).to_pylist() for name in names]
    for count, source, offset, size_bytes, split, digest, kind, detail in zip(counts.tolist(), *columns, strict=True):
        if kind is not None:
            writer.add_rejected(RejectedRow(source=source, offset_bytes=offset, kind=kind, detail=detail))
            continue
        row = DocumentRow(
            source=source, offset_bytes=offset, bytes=size_bytes, tokens=count, split=split, sha256=digest
        )
        writer.add_document(split, row)
        documents_of[source] += 1
        tokens_of[source, split] += count


def _groups(sources: Sequence[Source], tokens_of: Counter[tuple[str, SplitName]]) -> tuple[SnapshotGroup, ...]:
    """Sum the sources of each group, in their order."""
    members: dict[str, list[Source]] = {}
    for source in sources:
        if source.group:
            members.setdefault(source.group, []).append(source)
    return tuple(
        SnapshotGroup(
            name=name,
            sources=len(own),
            train_tokens=sum(tokens_of[source.name, "train"] for source in own),
            val_tokens=sum(tokens_of[source.name, "val"] for source in own),
        )
        for name, own in members.items()
    )
