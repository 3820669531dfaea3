"""The manifest of a data snapshot: what it holds, whence, and every object of it with its hash.

Owns the records of ``snapshot.json`` and their rules. Refuses to know where they lie (``data_snapshot``) and what the
tokens mean.
"""

from dataclasses import dataclass

import msgspec

from storage.snapshots.document_index import SPLITS, SplitName
from storage.snapshots.token_shard import ShardSchema
from storage.stores.object_store import is_key

SNAPSHOT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSize:
    """How much a split holds: ``bytes`` of UTF-8 text in ``documents``, ``tokens`` with the end-of-text tokens."""

    documents: int
    tokens: int
    bytes: int

    def __post_init__(self) -> None:
        """Refuse an empty split."""
        for name in ("documents", "tokens", "bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: a split holds at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSplits:
    """The two sides of the split."""

    train: SplitSize
    val: SplitSize


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotObject:
    """One object of the snapshot; ``key`` is relative to the snapshot's own folder.

    ``tokens`` is what a token shard holds; None for another object, and in manifests older than the field.
    """

    key: str
    bytes: int
    sha256: str
    tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse a key that is not a plain name, so that a manifest can point only into its own folder."""
        if "/" in self.key or not is_key(self.key):
            raise ValueError(f"key = {self.key[:80]!r}: must be a plain file name")
        if self.bytes < 0 or (self.tokens is not None and self.tokens < 0):
            raise ValueError(f"{self.key}: bytes {self.bytes}, tokens {self.tokens}: must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSource:
    """Where text came from: a source's name, its content, and how many documents of which ``unit`` it gave."""

    name: str
    bytes: int
    sha256: str
    unit: str
    documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedCount:
    """How many documents were left out for one ``kind`` of fault; the listing is `rejected.parquet`."""

    kind: str
    documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotGroup:
    """An entry of the sources whose documents lie together in each split, so that it can be drawn by weight.

    ``sources`` of the manifest's sources are its own; the tokens of the groups of a split follow each other in order.
    """

    name: str
    sources: int
    train_tokens: int
    val_tokens: int

    def tokens(self, split: SplitName) -> int:
        """Return how many tokens of a split are its own."""
        return self.train_tokens if split == "train" else self.val_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotManifest:
    """Everything there is to know of a snapshot; its encoded bytes are what the snapshot id hashes."""

    version: int
    tokenizer_sha256: str
    vocab_size: int
    end_of_text_id: int
    val_fraction: float
    splits: SnapshotSplits
    sources: tuple[SnapshotSource, ...]
    objects: tuple[SnapshotObject, ...] = ()
    rejected: tuple[RejectedCount, ...] = ()
    # Not written unless there are some: snapshots of before the field keep their ids.
    groups: tuple[SnapshotGroup, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        """Refuse an unknown version, an end-of-text token outside the vocabulary, and groups of other totals."""
        if self.version != SNAPSHOT_VERSION:
            raise ValueError(f"version = {self.version}: only {SNAPSHOT_VERSION} is read; update cairn")
        if not 0 <= self.end_of_text_id < self.vocab_size:
            raise ValueError(f"end_of_text_id = {self.end_of_text_id}: must be below vocab_size = {self.vocab_size}")
        for split in SPLITS if self.known_groups else ():
            held, promised = sum(group.tokens(split) for group in self.known_groups), self.split(split).tokens
            if held != promised:
                raise ValueError(f"groups hold {held} tokens of {split}: must be all of its {promised}")

    @property
    def known_groups(self) -> tuple[SnapshotGroup, ...]:
        """The groups in the order of their tokens; none where the sources lie together."""
        return () if isinstance(self.groups, msgspec.UnsetType) else self.groups

    @property
    def shard_schema(self) -> ShardSchema:
        """The schema every shard of this snapshot must have."""
        return ShardSchema(tokenizer_sha256=self.tokenizer_sha256, vocab_size=self.vocab_size)

    def split(self, name: SplitName) -> SplitSize:
        """Return the size of ``train`` or ``val``."""
        return self.splits.train if name == "train" else self.splits.val

    def bytes_per_token(self, name: SplitName) -> float:
        """Return UTF-8 bytes of text per token of a split, end-of-text tokens counted, as bits per byte needs it."""
        return self.split(name).bytes / self.split(name).tokens
