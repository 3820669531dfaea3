"""Token files of other trainers become a data snapshot, and a snapshot becomes token files.

Owns how a bare row of tokens becomes documents: each ends with its end-of-text token, or with its file. The tokens
themselves are kept as they are, so that what was imported can be exported byte for byte. Refuses to know the layouts
of the files (``storage.snapshots.token_file``) and text that is not tokenized yet.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizerFile

from model.data.tokenizer import END_OF_TEXT, Tokenizer
from model.errors import InvalidInput
from storage.errors import StorageError
from storage.snapshots.data_snapshot import (
    DOCUMENTS,
    SNAPSHOT_VERSION,
    TOKENIZER,
    SnapshotFiles,
    SnapshotManifest,
    SnapshotSource,
    SnapshotSplits,
    SplitSize,
    publish_snapshot,
)
from storage.snapshots.document_index import SPLITS, DocumentIndexWriter, DocumentRow, SplitName
from storage.snapshots.token_file import MAX_TOKEN_ID, TOKEN, TokenFile, TokenFileFormat, look_at, write_token_files
from storage.snapshots.token_shard import DEFAULT_SHARD_TOKENS, ShardSchema, ShardWriter
from storage.stores.object_store import ObjectStore
from storage.stores.verified_object import describe_file
from tasks.data.document import InvalidCorpus

DOCUMENT_TOKENS = 1 << 20
UNIT = "document of tokens"
_PEEK_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFiles:
    """What is imported: the files of each split in the order of their tokens."""

    train: tuple[Path, ...]
    val: tuple[Path, ...]

    def __post_init__(self) -> None:
        """Refuse a split without files, and two files of one name, which the index could not tell apart."""
        for split in SPLITS:
            if not self.of(split):
                raise InvalidCorpus(f"--{split}: names no file; rule: a snapshot has a train and a val split")
        names = [path.name for path in (*self.train, *self.val)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidCorpus(f"{twice[0]}: two files have this name; rule: names tell documents' sources apart")

    def of(self, split: SplitName) -> tuple[Path, ...]:
        """Return the files of a split."""
        return self.train if split == "train" else self.val


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedSnapshot:
    """What an import gave."""

    snapshot_id: str
    manifest: SnapshotManifest


def numbered_vocabulary(vocab_size: int, end_of_text_id: int) -> Tokenizer:
    """Return a stand-in for a tokenizer that is not at hand: it writes every id as its number."""
    if not 2 <= vocab_size <= MAX_TOKEN_ID + 1:
        raise InvalidCorpus(f"--vocab-size {vocab_size}: must lie in 2 to {MAX_TOKEN_ID + 1}, what 16 bits hold")
    if not 0 <= end_of_text_id < vocab_size:
        raise InvalidCorpus(f"--end-of-text {end_of_text_id}: must lie in 0 to {vocab_size - 1} (vocab-size - 1)")
    names = {END_OF_TEXT if number == end_of_text_id else str(number): number for number in range(vocab_size)}
    inner = TokenizerFile(models.WordLevel(names, unk_token=END_OF_TEXT))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tokenizer(inner)


def import_tokens(
    store: ObjectStore, files: TokenFiles, tokenizer: Tokenizer, *, allow_shared: bool = False
) -> ImportedSnapshot:
    """Publish the snapshot that holds exactly the files' tokens.

    Raises InvalidCorpus for a file that is none, an id outside the vocabulary, and, unless `allow_shared`, a document
    of val that is in train too.
    """
    schema = ShardSchema(tokenizer_sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size)
    with tempfile.TemporaryDirectory(prefix="cairn-import-") as staging:
        folder = Path(staging)
        (folder / TOKENIZER).write_bytes(tokenizer.to_json().encode("utf-8"))
        importing = _Import(folder, tokenizer, schema)
        try:
            importing.run(files)
        except StorageError as error:
            raise InvalidCorpus(str(error)) from error
        if importing.shared and not allow_shared:
            raise InvalidCorpus(
                f"{importing.shared} documents of val are in train too, the first at {importing.first_shared}; rule: "
                "train and val share no document. Give other files, or --allow-shared to measure on text trained on"
            )
        snapshot_id, manifest = publish_snapshot(store, folder, importing.manifest())
    return ImportedSnapshot(snapshot_id=snapshot_id, manifest=manifest)


def export_tokens(snapshot: SnapshotFiles, folder: Path, form: TokenFileFormat) -> tuple[Path, ...]:
    """Write both splits of a snapshot as token files into `folder`, made when needed; every shard is verified first.

    Raises InvalidCorpus for a vocabulary that 16 bits do not hold, StorageError where a file is there already.
    """
    vocab_size = snapshot.manifest.vocab_size
    if vocab_size > MAX_TOKEN_ID + 1:
        raise InvalidCorpus(
            f"data/{snapshot.snapshot_id}: its vocabulary has {vocab_size} ids; rule: {form} files hold 16-bit ids, "
            f"so at most {MAX_TOKEN_ID + 1}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written: tuple[Path, ...] = ()
    for split in SPLITS:
        shards = [shard.tokens() for shard in snapshot.shards(split)]
        written += write_token_files(folder, split, shards, form)
    return written


class _Import:
    """The files of one snapshot being written; counts what its manifest must say."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, schema: ShardSchema) -> None:
        self._folder, self._tokenizer, self._schema = folder, tokenizer, schema
        self._sizes = {split: {"documents": 0, "tokens": 0, "bytes": 0} for split in SPLITS}
        self._sources: list[SnapshotSource] = []
        self._of_val: set[bytes] = set()
        self.shared, self.first_shared = 0, ""

    def run(self, files: TokenFiles) -> None:
        """Write shards and index; val first, so that train can be held against its few documents."""
        with DocumentIndexWriter(self._folder / DOCUMENTS) as index, ExitStack() as stack:
            for split in reversed(SPLITS):
                writer = stack.enter_context(
                    ShardWriter(self._folder, split, self._schema, shard_tokens=DEFAULT_SHARD_TOKENS)
                )
                for path in files.of(split):
                    self._add_file(look_at(path), split, writer, index)

    def manifest(self) -> SnapshotManifest:
        """Return the manifest, still without objects; raises InvalidCorpus for a split without text."""
        for split in SPLITS:
            if not self._sizes[split]["bytes"]:
                raise InvalidCorpus(f"--{split}: holds nothing but ends of text; rule: each split has a document")
        train, val = (SplitSize(**self._sizes[split]) for split in SPLITS)
        return SnapshotManifest(
            version=SNAPSHOT_VERSION,
            tokenizer_sha256=self._tokenizer.sha256,
            vocab_size=self._schema.vocab_size,
            end_of_text_id=self._tokenizer.end_of_text_id,
            val_fraction=val.tokens / (train.tokens + val.tokens),
            splits=SnapshotSplits(train=train, val=val),
            sources=tuple(sorted(self._sources, key=lambda source: source.name)),
        )

    def _add_file(self, file: TokenFile, split: SplitName, writer: ShardWriter, index: DocumentIndexWriter) -> None:
        before, tokens, documents = file.path.stat(), file.map(), 0
        for start, stop in _documents(tokens, self._tokenizer.end_of_text_id):
            try:
                writer.append(tokens[start:stop])
            except StorageError as error:
                raise InvalidCorpus(f"{file.path}: tokens {start} to {stop - 1}: {error}") from error
            row = self._row(file, split, start, tokens[start:stop])
            index.append(row)
            self._count(row, split)
            documents += 1
        found, after = describe_file(file.path), file.path.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise InvalidCorpus(f"{file.path}: changed while it was read; import it again when it is still")
        self._sources.append(
            SnapshotSource(name=file.path.name, bytes=found.bytes, sha256=found.sha256, unit=UNIT, documents=documents)
        )

    def _row(self, file: TokenFile, split: SplitName, start: int, tokens: NDArray[Any]) -> DocumentRow:
        ends = len(tokens) > 0 and int(tokens[-1]) == self._tokenizer.end_of_text_id
        text = self._tokenizer.decode(tokens[: len(tokens) - ends].tolist()).encode("utf-8")
        return DocumentRow(
            source=file.path.name,
            offset_bytes=file.header_bytes + start * TOKEN.itemsize,
            bytes=len(text),
            tokens=len(tokens),
            split=split,
            sha256=hashlib.sha256(text).hexdigest(),
        )

    def _count(self, row: DocumentRow, split: SplitName) -> None:
        size = self._sizes[split]
        size["documents"] += 1
        size["tokens"] += row.tokens
        size["bytes"] += row.bytes
        digest = bytes.fromhex(row.sha256)[:16]
        if split == "val" and row.bytes:  # a file may begin with an end of text: that is no document to share
            self._of_val.add(digest)
        elif split == "train" and digest in self._of_val:
            self.first_shared = self.first_shared or f"{row.source}, byte {row.offset_bytes}"
            self.shared += 1


def _documents(tokens: NDArray[Any], end_of_text_id: int) -> Iterator[tuple[int, int]]:
    """Yield where each document starts and stops: after its end of text, at `DOCUMENT_TOKENS`, or with the file."""
    start = 0
    for first in range(0, len(tokens), _PEEK_TOKENS):
        ends = np.flatnonzero(tokens[first : first + _PEEK_TOKENS] == end_of_text_id) + first + 1
        for stop in (*ends.tolist(), min(first + _PEEK_TOKENS, len(tokens))):
            while stop - start > DOCUMENT_TOKENS:
                yield start, start + DOCUMENT_TOKENS
                start += DOCUMENT_TOKENS
            if stop > start and (tokens[stop - 1] == end_of_text_id or stop == len(tokens)):
                yield start, stop
                start = stop


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json; raises InvalidCorpus."""
    try:
        return Tokenizer.from_file(path)
    except InvalidInput as error:
        raise InvalidCorpus(f"--tokenizer: {error}") from error
