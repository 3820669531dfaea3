"""Corpora for tests: the same documents in every shape of file and compression."""

import gzip
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from cairn.model.configuration.data import DataConfig
from cairn.storage.snapshots import token_shard
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.data.corpus import open_corpus
from cairn.tasks.data.document import Source
from cairn.tasks.data.snapshot_build import build_snapshot
from cairn.tasks.data.snapshot_lookup import SnapshotReference

SHAPES = ("jsonl", "ndjson", "parquet")
COMPRESSIONS = ("", ".gz", ".zst")


def open_sources(sources: Sequence[str], base_dir: Path, **settings: Any) -> tuple[Source, ...]:
    """Open a corpus with these settings of `[data]`."""
    return open_corpus(DataConfig(sources=tuple(sources), **settings), base_dir)


def build_in_shards(shard_tokens: int, *args: Any, **named: Any) -> SnapshotReference:
    """Build a snapshot with shards of so many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_shard, "DEFAULT_SHARD_TOKENS", shard_tokens)
        return build_snapshot(*args, **named)


def build_with(
    tokenizer: Mapping[str, Any], folder: Path, store: ObjectStore, texts: Sequence[str], **settings: Any
) -> SnapshotReference:
    """Build a snapshot of texts, a line each, with a tokenizer.json of one's own."""
    (folder / "a.jsonl").write_bytes(shaped(texts, "jsonl"))
    (folder / "t.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return build_snapshot(store, DataConfig(sources=("a.jsonl",), tokenizer="t.json", **settings), folder)


def packed(content: bytes, compression: str) -> bytes:
    """Pack bytes as the suffix says."""
    if compression == ".gz":
        return gzip.compress(content, mtime=0)
    return pa.compress(content, codec="zstd", asbytes=True) if compression == ".zst" else content


def shaped(texts: Sequence[str], shape: str) -> bytes:
    """Return the content of a file that holds these texts, one document each."""
    if shape == "parquet":
        table = pa.table({"number": list(range(len(texts))), "text": list(texts), "other": list(texts)})
        sink = io.BytesIO()
        parquet.write_table(table, sink, row_group_size=7)
        return sink.getvalue()
    return b"".join(json.dumps({"id": n, "text": text}).encode() + b"\n" for n, text in enumerate(texts))
