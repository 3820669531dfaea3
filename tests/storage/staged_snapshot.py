"""A small data snapshot before it is published: its manifest, and its files in a folder."""

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cairn.storage.snapshots.data_snapshot import DOCUMENTS, TOKENIZER
from cairn.storage.snapshots.snapshot_manifest import (
    SNAPSHOT_VERSION,
    DocumentRow,
    RowWriter,
    SnapshotManifest,
    SnapshotSource,
    SnapshotSplits,
    SplitSize,
)
from cairn.storage.snapshots.token_shard import ShardWriter
from cairn.storage.stores.codec import sha256

ROW = DocumentRow(source="a.txt", offset_bytes=3, bytes=400, tokens=100, split="train", sha256="ab" * 32)


def manifest_of(*, train: int, val: int, vocab_size: int = 300) -> SnapshotManifest:
    """Return the manifest of so many tokens of each split."""
    return SnapshotManifest(
        version=SNAPSHOT_VERSION,
        tokenizer_sha256=sha256(b"{}"),
        vocab_size=vocab_size,
        end_of_text_id=256,
        val_fraction=0.1,
        splits=SnapshotSplits(
            train=SplitSize(documents=1, tokens=train, bytes=400), val=SplitSize(documents=1, tokens=val, bytes=25)
        ),
        sources=(SnapshotSource(name="a.txt", bytes=425, sha256="cd" * 32, unit="whole file", documents=2),),
    )


def stage_snapshot(
    folder: Path,
    manifest: SnapshotManifest,
    *,
    text: NDArray[np.int64] | None = None,
    shard_tokens: int = 64,
    rows: Sequence[DocumentRow] = (ROW,),
) -> Path:
    """Write the files of a snapshot, whose splits begin the text, or count from 0; return their folder."""
    folder.mkdir()
    (folder / TOKENIZER).write_bytes(b"{}")
    for split, size in (("train", manifest.splits.train), ("val", manifest.splits.val)):
        with ShardWriter(folder, split, manifest.shard_schema, shard_tokens=shard_tokens) as writer:
            writer.append(np.arange(size.tokens) if text is None else text[: size.tokens])
    with RowWriter(folder / DOCUMENTS) as index:
        index.extend([astuple(row) for row in rows])
    return folder
