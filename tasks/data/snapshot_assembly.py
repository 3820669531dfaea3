"""From finished parts to the files of a snapshot: token shards, document index, listing of what was left out.

Owns the layout's contents and their counts. Reads part by part in bounded memory: what it writes depends on the
documents and their order alone. Refuses to know where the parts came from and where the files go.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from model.data.tokenizer import Tokenizer
from storage.snapshots.data_snapshot import (
    DOCUMENTS,
    SNAPSHOT_VERSION,
    TOKENIZER,
    DocumentIndexWriter,
    DocumentRow,
    RejectedCount,
    RejectedRow,
    RejectedWriter,
    SnapshotGroup,
    SnapshotManifest,
    SnapshotSource,
    SnapshotSplits,
    SplitSize,
)
from storage.snapshots.token_shard import ShardSchema, ShardWriter
from tasks.data.document import Source
from tasks.data.document_split import Split

REJECTED = "rejected.parquet"


def shard_schema(tokenizer: Tokenizer) -> ShardSchema:
    """Return the schema of every shard with this tokenizer's ids."""
    return ShardSchema(tokenizer_sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size)


def assemble(
    folder: Path,
    batches: Iterable[pa.RecordBatch],
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    *,
    val_fraction: float,
    shard_tokens: int,
    on_batch: Callable[[pa.RecordBatch], None],
) -> SnapshotManifest:
    """Write every file of the snapshot into ``folder`` and return its manifest, still without objects."""
    (folder / TOKENIZER).write_bytes(tokenizer.to_json().encode("utf-8"))
    with _Assembly(folder, shard_schema(tokenizer), shard_tokens) as assembly:
        for batch in batches:
            assembly.add(batch)
            on_batch(batch)
    return SnapshotManifest(
        version=SNAPSHOT_VERSION,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=tokenizer.end_of_text_id,
        val_fraction=val_fraction,
        splits=SnapshotSplits(train=assembly.size(Split.TRAIN), val=assembly.size(Split.VAL)),
        sources=tuple(_snapshot_source(item, assembly.documents_of[item.name]) for item in sources),
        rejected=tuple(RejectedCount(kind=kind, documents=n) for kind, n in sorted(assembly.rejected.items())),
        groups=_groups(sources, assembly.tokens_of) or msgspec.UNSET,
    )


class _Assembly:
    """The open files of a snapshot and what they hold so far."""

    def __init__(self, folder: Path, schema: ShardSchema, shard_tokens: int) -> None:
        self._folder, self._schema, self._shard_tokens = folder, schema, shard_tokens
        self._stack = ExitStack()
        self._rejects: RejectedWriter | None = None
        self._documents, self._tokens, self._bytes = Counter[Split](), Counter[Split](), Counter[Split]()
        self.documents_of, self.rejected = Counter[str](), Counter[str]()
        self.tokens_of = Counter[tuple[str, Split]]()

    def __enter__(self) -> "_Assembly":
        self._index = self._stack.enter_context(DocumentIndexWriter(self._folder / DOCUMENTS))
        self._shards = {
            split: self._stack.enter_context(
                ShardWriter(self._folder, split.value, self._schema, shard_tokens=self._shard_tokens)
            )
            for split in Split
        }
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def add(self, batch: pa.RecordBatch) -> None:
        """Write the documents of a batch, and list those that were left out."""
        column = {name: batch.column(name) for name in batch.schema.names}
        counts = np.diff(column["ids"].offsets.to_numpy())
        self._add_tokens(column["ids"], counts, column["split"].to_numpy(zero_copy_only=False))
        rows = {name: column[name].to_pylist() for name in column if name != "ids"}
        names = ("source", "offset_bytes", "bytes", "split", "sha256", "kind", "detail")
        for tokens, row in zip(counts.tolist(), zip(*(rows[name] for name in names), strict=True), strict=True):
            source, offset, size_bytes, split, digest, kind, detail = row
            if kind is None:
                self._add_document(source, offset, size_bytes, tokens, split, digest)
            else:
                self._add_rejected(RejectedRow(source=source, offset_bytes=offset, kind=kind, detail=detail))

    def size(self, split: Split) -> SplitSize:
        """Return how much a split holds."""
        return SplitSize(documents=self._documents[split], tokens=self._tokens[split], bytes=self._bytes[split])

    def _add_tokens(self, ids: Any, counts: Any, splits: Any) -> None:
        values = ids.values.to_numpy()
        for split, writer in self._shards.items():
            writer.append(values[np.repeat(splits == split.value, counts)])

    def _add_document(
        self, source: str, offset_bytes: int, size_bytes: int, tokens: int, split: str, sha256: str
    ) -> None:
        self._index.append(
            DocumentRow(
                source=source, offset_bytes=offset_bytes, bytes=size_bytes, tokens=tokens, split=split, sha256=sha256
            )
        )
        side = Split(split)
        self._documents[side] += 1
        self._tokens[side] += tokens
        self._bytes[side] += size_bytes
        self.documents_of[source] += 1
        self.tokens_of[source, side] += tokens

    def _add_rejected(self, row: RejectedRow) -> None:
        if self._rejects is None:  # no file says that nothing was left out
            self._rejects = self._stack.enter_context(RejectedWriter(self._folder / REJECTED))
        self._rejects.append(row)
        self.rejected[row.kind] += 1


def _snapshot_source(source: Source, documents: int) -> SnapshotSource:
    return SnapshotSource(
        name=source.name, bytes=source.bytes, sha256=source.sha256, unit=source.unit, documents=documents
    )


def _groups(sources: Sequence[Source], tokens_of: Counter[tuple[str, Split]]) -> tuple[SnapshotGroup, ...]:
    """Sum up the sources of each group, in their order; a source without a group is in none."""
    members: dict[str, list[Source]] = {}
    for source in sources:
        if source.group:
            members.setdefault(source.group, []).append(source)
    return tuple(
        SnapshotGroup(
            name=name,
            sources=len(own),
            train_tokens=sum(tokens_of[source.name, Split.TRAIN] for source in own),
            val_tokens=sum(tokens_of[source.name, Split.VAL] for source in own),
        )
        for name, own in members.items()
    )
