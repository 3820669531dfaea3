"""A data snapshot: immutable token shards, tokenizer and document index, named by the hash of their manifest.

Owns the layout ``data/<snapshot_id>/`` and what may be believed of it: ``snapshot.json`` is written last, so a torn
snapshot is invisible, and nothing is used before it hashed to what the manifest says. Refuses to know what the tokens
mean and where the text came from.
"""

import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from storage.document import decode, encode, sha256
from storage.document_index import DocumentIndexWriter as DocumentIndexWriter
from storage.document_index import DocumentRow as DocumentRow
from storage.document_index import RejectedRow as RejectedRow
from storage.document_index import RejectedWriter as RejectedWriter
from storage.document_index import SplitName as SplitName
from storage.errors import IntegrityError, ObjectMissing, SnapshotDamaged
from storage.object_store import ObjectStore
from storage.token_shard import ShardSchema, map_shard
from storage.verified_object import PromisedObject, check_object, save_verified

SNAPSHOT_VERSION = 1
TOKENIZER = "tokenizer.json"
DOCUMENTS = "documents.parquet"
CHUNK_BYTES = 1 << 20
REJECTED = "rejected.parquet"


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
    """One object of the snapshot; ``key`` is relative to the snapshot's own folder."""

    key: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        """Refuse a key that is not a plain name, so that a manifest can point only into its own folder."""
        if not self.key or "/" in self.key or self.key.startswith("."):
            raise ValueError(f"key = {self.key!r}: must be a plain file name")


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

    def __post_init__(self) -> None:
        """Refuse a version this code does not know, and an end-of-text token outside the vocabulary."""
        if self.version != SNAPSHOT_VERSION:
            raise ValueError(f"version = {self.version}: only {SNAPSHOT_VERSION} is read; update cairn")
        if not 0 <= self.end_of_text_id < self.vocab_size:
            raise ValueError(f"end_of_text_id = {self.end_of_text_id}: must be below vocab_size = {self.vocab_size}")

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


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSnapshot:
    """A verified snapshot: read-only token arrays (N_k,) that are memory maps, and the tokenizer as JSON text."""

    snapshot_id: str
    manifest: SnapshotManifest
    tokenizer_json: str
    train: tuple[NDArray[Any], ...]
    val: tuple[NDArray[Any], ...]
    train_files: tuple[Path, ...] = ()

    def bytes_per_token(self, name: SplitName) -> float:
        """Return UTF-8 bytes of text per token of a split."""
        return self.manifest.bytes_per_token(name)


def write_document_index(path: Path, rows: Iterable[DocumentRow]) -> None:
    """Write the document index as one Parquet file, in the given order."""
    with DocumentIndexWriter(path) as index:
        for row in rows:
            index.append(row)


def publish_snapshot(store: ObjectStore, folder: Path, manifest: SnapshotManifest) -> tuple[str, SnapshotManifest]:
    """Upload the staged files of ``folder``, then create ``snapshot.json``; returns the id and the full manifest.

    ``manifest`` comes without objects. Doing it again, or twice at once, changes nothing. Raises IntegrityError when
    the store did not keep what was sent.
    """
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    full = replace(manifest, objects=tuple(_describe(path) for path in paths))
    data = encode(full)
    snapshot_id = sha256(data)
    marker = _key(snapshot_id, "snapshot.json")
    if store.size(marker) is None:
        for item in full.objects:
            _upload(store, _key(snapshot_id, item.key), folder / item.key, item)
        store.write(marker, data)  # its name is its content: whoever writes it writes the same
    if store.read(marker) != data:
        raise IntegrityError(f"{marker}: is not what its name says; delete data/{snapshot_id} and run again")
    return snapshot_id, full


def read_manifest(store: ObjectStore, snapshot_id: str) -> SnapshotManifest:
    """Return the manifest of a snapshot; raises ObjectMissing where there is none, IntegrityError where it differs."""
    key = _key(snapshot_id, "snapshot.json")
    try:
        data = store.read(key)
    except ObjectMissing as missing:
        raise ObjectMissing(f"{key}: no such data snapshot; build it again from its sources") from missing
    if sha256(data) != snapshot_id:
        raise _damaged(key, sha256(data), snapshot_id)
    return decode(data, SnapshotManifest, where=key)


def damaged_objects(store: ObjectStore, snapshot_id: str) -> tuple[SnapshotObject, ...]:
    """Return the objects of the snapshot that are missing or not what its manifest says; reads every byte."""
    manifest = read_manifest(store, snapshot_id)
    return tuple(item for item in manifest.objects if not _is_sound(store, snapshot_id, item))


def drop_damaged_copies(cache_dir: Path, manifest: SnapshotManifest) -> int:
    """Delete cached copies that are no longer what their name says; returns how many there were."""
    copies = [cache_dir / item.sha256 for item in manifest.objects]
    damaged = [path for path in copies if path.is_file() and _describe(path).sha256 != path.name]
    for path in damaged:
        path.unlink(missing_ok=True)
    return len(damaged)


def replace_object(store: ObjectStore, snapshot_id: str, item: SnapshotObject, path: Path) -> None:
    """Upload `path` over a damaged object; raises `SnapshotDamaged`, before it, where the file is another."""
    found = _describe(path)
    if (found.bytes, found.sha256) != (item.bytes, item.sha256):
        raise SnapshotDamaged(
            f"{_key(snapshot_id, item.key)}: damaged, and its sources give other bytes now: "
            f"sha256 {found.sha256[:12]}… instead of {item.sha256[:12]}…"
        )
    _upload(store, _key(snapshot_id, item.key), path, item)


def open_snapshot(store: ObjectStore, snapshot_id: str, cache_dir: Path) -> OpenSnapshot:
    """Verify every object of the snapshot and map its shards.

    A store without local files has its shards kept in ``cache_dir`` under their hash, verified again at every start.
    Raises IntegrityError naming the object that does not verify.
    """
    manifest = read_manifest(store, snapshot_id)
    paths = {item.key: _verified_file(store, snapshot_id, item, cache_dir) for item in manifest.objects}
    if TOKENIZER not in paths:
        raise IntegrityError(f"{_key(snapshot_id, 'snapshot.json')}: names no {TOKENIZER}")
    opened = OpenSnapshot(
        snapshot_id=snapshot_id,
        manifest=manifest,
        tokenizer_json=paths[TOKENIZER].read_text(encoding="utf-8"),
        train=_map_split(paths, "train", snapshot_id, manifest.shard_schema),
        val=_map_split(paths, "val", snapshot_id, manifest.shard_schema),
        train_files=tuple(paths[name] for name in sorted(paths) if name.startswith("train-")),
    )
    for name, shards in (("train", opened.train), ("val", opened.val)):
        held, promised = sum(map(len, shards)), (manifest.split("train" if name == "train" else "val").tokens)
        if held != promised:
            raise IntegrityError(f"data/{snapshot_id}: {name} shards hold {held} tokens, the manifest says {promised}")
    return opened


def _is_sound(store: ObjectStore, snapshot_id: str, item: SnapshotObject) -> bool:
    try:
        check_object(store, PromisedObject(key=_key(snapshot_id, item.key), bytes=item.bytes, sha256=item.sha256))
    except IntegrityError:
        return False
    return True


def _map_split(paths: dict[str, Path], split: str, snapshot_id: str, schema: ShardSchema) -> tuple[NDArray[Any], ...]:
    names = sorted(name for name in paths if name.startswith(f"{split}-"))
    return tuple(map_shard(paths[name], schema, where=_key(snapshot_id, name)) for name in names)


def _key(snapshot_id: str, name: str) -> str:
    return f"data/{snapshot_id}/{name}"


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _describe(path: Path) -> SnapshotObject:
    digest, size_bytes = hashlib.sha256(), 0
    for chunk in _chunks(path):
        digest.update(chunk)
        size_bytes += len(chunk)
    return SnapshotObject(key=path.name, bytes=size_bytes, sha256=digest.hexdigest())


def _upload(store: ObjectStore, key: str, path: Path, item: SnapshotObject) -> None:
    written = store.write_stream(key, _chunks(path))
    if (written.bytes, written.sha256) != (item.bytes, item.sha256):
        raise _damaged(key, written.sha256, item.sha256)


def _verified_file(store: ObjectStore, snapshot_id: str, item: SnapshotObject, cache_dir: Path) -> Path:
    key = _key(snapshot_id, item.key)
    path, promised = store.local_path(key), PromisedObject(key=key, bytes=item.bytes, sha256=item.sha256)
    try:
        if path is None:
            return _cached_file(store, promised, cache_dir)
        check_object(store, promised)
    except IntegrityError as error:
        raise SnapshotDamaged(f"{error}; delete data/{snapshot_id} and build it again") from error
    return path


def _cached_file(store: ObjectStore, promised: PromisedObject, cache_dir: Path) -> Path:
    path = cache_dir / promised.sha256
    if path.is_file() and _describe(path).sha256 == promised.sha256:
        return path
    cache_dir.mkdir(parents=True, exist_ok=True)
    temporary = cache_dir / f".{uuid.uuid4().hex}"
    try:
        save_verified(store, promised, temporary)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return path


def _damaged(key: str, found: str, expected: str) -> IntegrityError:
    folder = key.rpartition("/")[0]
    return IntegrityError(f"{key}: sha256 is {found}, expected {expected}; delete {folder} and build it again")
