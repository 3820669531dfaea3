"""The manifest of a data snapshot, `snapshot.json`: its splits, sources and objects."""

from dataclasses import dataclass

import msgspec

from cairn.storage.snapshots import document_index, token_shard
from cairn.storage.stores.object_store import ExpectedObject, is_key

SNAPSHOT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSize:
    """The size of a split: `bytes` of UTF-8 text, `tokens` including end-of-text tokens."""

    documents: int
    tokens: int
    bytes: int

    def __post_init__(self) -> None:
        for name in ("documents", "tokens", "bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: a split holds at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSplits:
    """The sizes of both splits."""

    train: SplitSize
    val: SplitSize


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotObject(ExpectedObject):
    """One object of the snapshot, by its name in the snapshot's folder; only token shards have `tokens`."""

    tokens: int | None = None

    def __post_init__(self) -> None:
        if "/" in self.key or not is_key(self.key):
            raise ValueError(f"key = {self.key[:80]!r}: must be a plain file name")
        if self.bytes < 0 or (self.tokens is not None and self.tokens < 0):
            raise ValueError(f"{self.key}: bytes {self.bytes}, tokens {self.tokens}: must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSource:
    """A source of text: its name, its content, and its number of documents; `unit` is what a document is in it."""

    name: str
    bytes: int
    sha256: str
    unit: str
    documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedCount:
    """Number of documents rejected for one `kind` of fault; `rejected.parquet` lists them."""

    kind: str
    documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotGroup:
    """An entry of `data.sources`, of so many `sources`: contiguous in each split, so that it can be drawn by weight."""

    name: str
    sources: int
    train_tokens: int
    val_tokens: int

    def tokens(self, split: document_index.SplitName) -> int:
        """Return its tokens of a split."""
        return self.train_tokens if split == "train" else self.val_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotManifest:
    """The content of a snapshot; the snapshot id is the SHA-256 of its encoded bytes."""

    version: int
    tokenizer_sha256: str
    vocab_size: int
    end_of_text_id: int
    val_fraction: float
    splits: SnapshotSplits
    sources: tuple[SnapshotSource, ...]
    objects: tuple[SnapshotObject, ...] = ()
    rejected: tuple[RejectedCount, ...] = ()
    # Written only if there are some: a snapshot without groups has one id.
    groups: tuple[SnapshotGroup, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.version != SNAPSHOT_VERSION:
            raise ValueError(f"version = {self.version}: only {SNAPSHOT_VERSION} is read; update cairn")
        if not 0 <= self.end_of_text_id < self.vocab_size:
            raise ValueError(f"end_of_text_id = {self.end_of_text_id}: must be below vocab_size = {self.vocab_size}")
        for split in document_index.SPLITS if self.known_groups else ():
            held, promised = sum(group.tokens(split) for group in self.known_groups), self.split(split).tokens
            if held != promised:
                raise ValueError(f"groups hold {held} tokens of {split}: must be all of its {promised}")

    @property
    def known_groups(self) -> tuple[SnapshotGroup, ...]:
        """The groups in token order; empty without weights."""
        return () if isinstance(self.groups, msgspec.UnsetType) else self.groups

    @property
    def shard_schema(self) -> token_shard.ShardSchema:
        """The schema of every shard."""
        return token_shard.ShardSchema(tokenizer_sha256=self.tokenizer_sha256, vocab_size=self.vocab_size)

    def split(self, name: document_index.SplitName) -> SplitSize:
        """Return the size of a split."""
        return self.splits.train if name == "train" else self.splits.val

    def bytes_per_token(self, name: document_index.SplitName) -> float:
        """Return UTF-8 bytes of text per token of a split, end-of-text tokens included."""
        return self.split(name).bytes / self.split(name).tokens
