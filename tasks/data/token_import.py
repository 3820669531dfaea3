"""Imports token files as a snapshot, and exports one; documents end with their token, their index or their file."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizerFile

from cairn.model.data.tokenizer import END_OF_TEXT, Tokenizer
from cairn.model.data.tokenizer_file import MAX_VOCABULARY
from cairn.model.errors import InvalidInput
from cairn.storage.errors import StorageError, restated
from cairn.storage.snapshots import data_snapshot
from cairn.storage.snapshots.snapshot_manifest import SPLITS, SnapshotManifest, SnapshotSource, SplitName
from cairn.storage.stores import child_process, codec, object_store
from cairn.tasks.data import foreign_tokenizer, snapshot_writer, token_files
from cairn.tasks.data.document import InvalidCorpus, short_hash
from cairn.tasks.data.snapshot_lookup import SnapshotReference
from cairn.tasks.data.token_files import TokenFile, TokenFileFormat
from cairn.tasks.errors import InvalidConfiguration

DOCUMENT_TOKENS = 1 << 20
GPT2_VOCABULARY = 50_257
"""Its greatest id is its end of text, in every file of nanoGPT and llm.c."""
_UNIT = "document of tokens"
_PEEK_TOKENS = 1 << 22


TokenFiles: TypeAlias = Mapping[SplitName, Sequence[Path]]
"""The files of each split in the order of their tokens."""


def numbered_vocabulary(vocab_size: int, end_of_text_id: int) -> Tokenizer:
    """Return a tokenizer that decodes every id to its number, for tokens without a tokenizer."""
    if not 2 <= vocab_size <= MAX_VOCABULARY:
        raise InvalidCorpus(f"--vocab-size {vocab_size}: must lie in 2 to {MAX_VOCABULARY}")
    if not 0 <= end_of_text_id < vocab_size:
        raise InvalidCorpus(f"--end-of-text {end_of_text_id}: must lie in 0 to {vocab_size - 1} (vocab-size - 1)")
    names = {END_OF_TEXT if number == end_of_text_id else str(number): number for number in range(vocab_size)}
    inner = TokenizerFile(models.WordLevel(names, unk_token=END_OF_TEXT))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tokenizer(inner)


def import_tokens(
    store: object_store.ObjectStore,
    files: TokenFiles,
    tokenizer: Tokenizer,
    *,
    dtype: str = "",
    allow_shared: bool = False,
    assumes_end: bool = False,
) -> SnapshotReference:
    """Publish the snapshot of these tokens, of `dtype` where a file does not say it.

    Raises InvalidCorpus, also for a document in both splits, if not `allow_shared`, and for an end of text, if
    `assumes_end` says that nobody has named the id.
    """
    with child_process.temporary_folder("cairn-import-") as staging:
        importing = _Import(tokenizer, dtype, assumes_end)
        try:
            manifest = importing.run(files, staging)
        except StorageError as error:
            raise InvalidCorpus(str(error)) from error
        if importing.shared and not allow_shared:
            problem = f"{importing.shared} documents of val are in train too, the first at {importing.first_shared}"
            remedy = "Give other files, or --allow-shared to measure on text trained on"
            raise InvalidCorpus(f"{problem}; rule: train and val share no document. {remedy}")
        snapshot_id, manifest = data_snapshot.publish_snapshot(store, staging, manifest)
    return SnapshotReference(snapshot_id=snapshot_id, manifest=manifest, added_ends=importing.added_ends)


def export_tokens(snapshot: data_snapshot.SnapshotFiles, folder: Path, form: TokenFileFormat) -> tuple[TokenFile, ...]:
    """Verify both splits, write them into `folder` and return the files; raises InvalidCorpus or StorageError."""
    if snapshot.answers("train"):
        rule = "token files say of no token whether the loss counts it. Give the other trainer the conversations"
        raise InvalidCorpus(f"{snapshot.snapshot_id[:12]}: holds conversations, of which answers count; rule: {rule}")
    shards = {split: [shard.tokens() for shard in snapshot.shards(split)] for split in SPLITS}
    size = snapshot.manifest.vocab_size
    with restated(OSError, InvalidCorpus, f"{folder}: cannot be written", rule="a folder this user may write to"):
        folder.mkdir(parents=True, exist_ok=True)
        written = (token_files.write_token_files(folder, one, shards[one], form, vocab_size=size) for one in SPLITS)
        return tuple(chain.from_iterable(written))


class _Import:
    """One import: its sources so far, and the documents that both splits have."""

    def __init__(self, tokenizer: Tokenizer, dtype: str, assumes_end: bool) -> None:
        self._tokenizer, self._dtype, self._assumes_end = tokenizer, dtype, assumes_end
        self._sources: list[SnapshotSource] = []
        self._val_digests: set[bytes] = set()
        self.shared, self.first_shared, self.added_ends = 0, "", 0

    def run(self, files: TokenFiles, folder: Path) -> SnapshotManifest:
        """Write the snapshot's files; val first, so that train is compared with its few documents."""
        for split in SPLITS:
            if not files[split]:
                raise InvalidCorpus(f"--{split}: names no file; rule: a snapshot has a train and a val split")
        names = Counter(path.name for split in SPLITS for path in files[split])
        if twice := sorted(name for name in names if names[name] > 1):
            raise InvalidCorpus(f"{twice[0]}: two files have this name; rule: names tell documents' sources apart")
        # All before the first is read, which may take hours.
        inspected = dict[SplitName, list[TokenFile]]()
        for split in SPLITS:
            inspected[split] = [token_files.inspect_token_file(path, self._dtype) for path in files[split]]
            for file in inspected[split]:
                file.require_ids(self._tokenizer.vocab_size, self._tokenizer.end_of_text_id)
        with snapshot_writer.SnapshotWriter(folder, self._tokenizer) as writer:
            for split in reversed(SPLITS):
                for file in inspected[split]:
                    self._add_file(file, split, writer)
        for split in SPLITS:
            if not writer.sizes[split]["bytes"]:
                raise InvalidCorpus(f"--{split}: holds nothing but ends of text; rule: each split has a document")
        tokens = {split: writer.sizes[split]["tokens"] for split in SPLITS}
        sources = sorted(self._sources, key=lambda source: source.name)
        return writer.manifest(sources, val_fraction=tokens["val"] / sum(tokens.values()))

    def _add_file(self, file: TokenFile, split: SplitName, writer: snapshot_writer.SnapshotWriter) -> None:
        before, tokens, documents = file.path.stat(), file.map(), 0
        end = self._tokenizer.end_of_text_id
        for start, stop, is_indexed in _documents(tokens, end, file.document_ends):
            is_added = is_indexed and int(tokens[stop - 1]) != end
            try:
                writer.add_tokens(split, tokens[start:stop])
                if is_added:
                    writer.add_tokens(split, np.array([end]))
            except StorageError as error:
                width = "" if file.declared else ", or their width: --dtype uint32"
                remedy = f"Name the vocabulary that made them{width}"
                raise InvalidCorpus(f"{file.path}: tokens {start} to {stop - 1}: {error}. {remedy}") from error
            ends = int(tokens[stop - 1]) == end
            if ends and self._assumes_end:
                problem = f"token {stop - 1} is {end}, the greatest id, and nothing says that it ends a document"
                rule = f"ids but GPT-2's {GPT2_VOCABULARY:,} name their end. Add --end-of-text {end} if it does"
                other = f"or take --vocab-size {end + 2} if it is a token like others"
                raise InvalidCorpus(f"{file.path}: {problem}; rule: {rule}, {other}")
            self.added_ends += is_added
            text = self._tokenizer.decode(tokens[start : stop - ends].tolist()).encode("utf-8")
            sha256, offset = codec.sha256(text), file.header_bytes + start * file.dtype.itemsize
            writer.add_documents([(file.path.name, offset, len(text), stop - start + is_added, split, sha256)])
            digest = short_hash(sha256)
            if split == "val" and text:  # an end of text at the start of a file is not a document
                self._val_digests.add(digest)
            elif split == "train" and digest in self._val_digests:
                self.first_shared = self.first_shared or f"{file.path.name}, byte {offset}"
                self.shared += 1
            documents += 1
        found, after = object_store.describe_file(file.path), file.path.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise InvalidCorpus(f"{file.path}: changed while it was read; import it again when it is still")
        where, size, sha256 = file.path.name, found.bytes, found.sha256
        self._sources.append(SnapshotSource(name=where, bytes=size, sha256=sha256, unit=_UNIT, documents=documents))


def _documents(tokens: NDArray[Any], end_of_text_id: int, index: NDArray[np.int64]) -> Iterator[tuple[int, int, bool]]:
    """Yield start and stop of each document, and whether the index ends it there.

    It ends after its end of text, where the index says, at `DOCUMENT_TOKENS`, or with the file.
    """
    start = 0
    for first in range(0, len(tokens), _PEEK_TOKENS):
        last = min(first + _PEEK_TOKENS, len(tokens))
        marked = np.flatnonzero(tokens[first:last] == end_of_text_id) + first + 1
        indexed = index[slice(*np.searchsorted(index, (first, last), side="right"))]
        ends = np.union1d(marked, indexed)
        stops = np.union1d(ends, last) if last == len(tokens) else ends
        for stop, is_indexed in zip(stops.tolist(), np.isin(stops, indexed).tolist(), strict=True):
            while stop - start > DOCUMENT_TOKENS:
                yield start, start + DOCUMENT_TOKENS, False
                start += DOCUMENT_TOKENS
            if stop > start:
                yield start, stop, is_indexed
                start = stop


def given_tokenizer(path: str, vocab_size: int, end_of_text_id: int) -> Tokenizer:
    """Return that of a tokenizer.json or of so many numbers; raises InvalidCorpus.

    With an `end_of_text_id` of -1 documents end as the tokenizer says, or with the greatest of the numbers.
    """
    if bool(path) == bool(vocab_size):
        raise InvalidConfiguration("--tokenizer, --vocab-size: give one of them; the ids' meaning is in no .bin file")
    if not path:
        return numbered_vocabulary(vocab_size, vocab_size - 1 if end_of_text_id < 0 else end_of_text_id)
    named_id = None if end_of_text_id < 0 else end_of_text_id
    with restated(InvalidInput, InvalidCorpus, "--tokenizer"):
        found = foreign_tokenizer.read_tokenizer(Path(path), end_of_text_id=named_id)
    if found.end_of_text_id >= found.vocab_size:
        rule = f"must lie in 0 to {found.vocab_size - 1}, the tokenizer's ids"
        raise InvalidCorpus(f"--end-of-text {end_of_text_id}: {rule}")
    return found
