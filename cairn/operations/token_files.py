"""Imports and exports token files for `cairn import-tokens` and `cairn export-tokens`."""

import os
from dataclasses import dataclass
from pathlib import Path

from model.data.tokenizer import Tokenizer
from reports.queries.data_summary import find_snapshot
from storage.snapshots.data_snapshot import SnapshotFiles
from storage.snapshots.token_file import TokenFileFormat, inspect_token_file
from storage.stores.object_store import ObjectStore
from tasks.data.token_import import TokenFiles, export_tokens, import_tokens
from tasks.machine.placement import work_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportView:
    """The snapshot an import made; sizes are per split."""

    snapshot_id: str
    tokens: dict[str, int]
    documents: dict[str, int]
    bytes: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedFile:
    """A token file that was written."""

    path: str
    tokens: int


def import_snapshot(store: ObjectStore, files: TokenFiles, tokenizer: Tokenizer, *, allow_shared: bool) -> ImportView:
    """Make the snapshot; raises `InvalidCorpus` for invalid files."""
    made = import_tokens(store, files, tokenizer, allow_shared=allow_shared)
    splits = {"train": made.manifest.splits.train, "val": made.manifest.splits.val}
    return ImportView(
        snapshot_id=made.snapshot_id,
        tokens={name: split.tokens for name, split in splits.items()},
        documents={name: split.documents for name, split in splits.items()},
        bytes={name: split.bytes for name, split in splits.items()},
    )


def export_snapshot(store: ObjectStore, reference: str, folder: str, form: str) -> tuple[ExportedFile, ...]:
    """Write the splits of the snapshot that `reference` means into `folder`."""
    snapshot_id = find_snapshot(store, reference).snapshot_id
    files = SnapshotFiles(store, snapshot_id, work_folder(os.environ) / "snapshots")
    written = export_tokens(files, Path(folder), TokenFileFormat(form))
    return tuple(ExportedFile(path=str(path), tokens=inspect_token_file(path).tokens) for path in written)
