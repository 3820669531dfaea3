"""A data snapshot: immutable token shards, tokenizer and document index, named by the hash of their manifest.

Owns the layout ``data/<snapshot_id>/`` and what may be believed of it: ``snapshot.json`` is written last, so a torn
snapshot is invisible, and nothing is used before it hashed to what the manifest says. Refuses to know what the tokens
mean and where the text came from.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from storage.errors import IntegrityError, ObjectMissing, SnapshotDamaged
from storage.snapshots.document_index import DocumentIndexWriter as DocumentIndexWriter
from storage.snapshots.document_index import DocumentRow as DocumentRow
from storage.snapshots.document_index import RejectedRow as RejectedRow
from storage.snapshots.document_index import RejectedWriter as RejectedWriter
from storage.snapshots.document_index import SplitName as SplitName
from storage.snapshots.snapshot_cache import DEFAULT_CACHE_BYTES, SnapshotCache, cache_bytes
from storage.snapshots.snapshot_manifest import SNAPSHOT_VERSION as SNAPSHOT_VERSION
from storage.snapshots.snapshot_manifest import RejectedCount as RejectedCount
from storage.snapshots.snapshot_manifest import SnapshotGroup as SnapshotGroup
from storage.snapshots.snapshot_manifest import SnapshotManifest as SnapshotManifest
from storage.snapshots.snapshot_manifest import SnapshotObject as SnapshotObject
from storage.snapshots.snapshot_manifest import SnapshotSource as SnapshotSource
from storage.snapshots.snapshot_manifest import SnapshotSplits as SnapshotSplits
from storage.snapshots.snapshot_manifest import SplitSize as SplitSize
from storage.snapshots.token_shard import SHARD_SUFFIX, count_tokens, map_shard
from storage.snapshots.verified_shard import VerifiedShard
from storage.stores.document import decode, encode, sha256
from storage.stores.object_store import ObjectStore
from storage.stores.verified_object import ExpectedObject, check_object, describe_file

ID_CHARACTERS = 64
TOKENIZER = "tokenizer.json"
DOCUMENTS = "documents.parquet"
CHUNK_BYTES = 1 << 20
EAGER_BYTES = 64 * 1024 * 1024
REJECTED = "rejected.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSnapshot:
    """A snapshot to train on: read-only rows of tokens (N_k,) that are memory maps, and the tokenizer as JSON text.

    The rows slice and convert as NumPy rows do, and raise SnapshotDamaged naming their shard before a token of a
    damaged one is used.
    """

    snapshot_id: str
    manifest: SnapshotManifest
    tokenizer_json: str
    train: tuple[VerifiedShard, ...]
    val: tuple[VerifiedShard, ...]
    train_files: tuple[Path, ...] = ()

    def bytes_per_token(self, name: SplitName) -> float:
        """Return UTF-8 bytes of text per token of a split."""
        return self.manifest.bytes_per_token(name)


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


def snapshot_ids(store: ObjectStore) -> tuple[str, ...]:
    """Return the ids of the snapshots in the store, sorted; one whose upload is not over may be among them."""
    names = (key.rpartition("/")[2] for key in store.folders("data"))
    return tuple(name for name in names if len(name) == ID_CHARACTERS)


def damaged_objects(store: ObjectStore, snapshot_id: str) -> tuple[SnapshotObject, ...]:
    """Return the objects of the snapshot that are missing or not what its manifest says; reads every byte."""
    manifest = read_manifest(store, snapshot_id)
    return tuple(item for item in manifest.objects if not _is_sound(store, snapshot_id, item))


def drop_damaged_copies(cache_dir: Path, manifest: SnapshotManifest) -> int:
    """Delete cached copies that are no longer what their name says; returns how many there were."""
    cache = SnapshotCache(cache_dir, limit_bytes=DEFAULT_CACHE_BYTES)
    return sum(cache.drop_damaged(_promised("cache", item)) for item in manifest.objects)


def replace_object(store: ObjectStore, snapshot_id: str, item: SnapshotObject, path: Path) -> None:
    """Upload `path` over a damaged object; raises `SnapshotDamaged`, before it, where the file is another."""
    found = describe_file(path)
    if (found.bytes, found.sha256) != (item.bytes, item.sha256):
        raise SnapshotDamaged(
            f"{_key(snapshot_id, item.key)}: damaged, and its sources give other bytes now: "
            f"sha256 {found.sha256[:12]}… instead of {item.sha256[:12]}…"
        )
    _upload(store, _key(snapshot_id, item.key), path, item)


class SnapshotFiles:
    """The objects of a snapshot as files of this machine, each hashed when it is first asked for.

    A store without local files has them kept in a cache, where they stay while this or a shard of it is referred to.
    """

    def __init__(
        self, store: ObjectStore, snapshot_id: str, cache_dir: Path, *, limit_bytes: int | None = None
    ) -> None:
        """Read the manifest; nothing else. `limit_bytes` bounds the cache, None for what the environment says."""
        self.manifest = read_manifest(store, snapshot_id)
        self.snapshot_id = snapshot_id
        self._store, self._verified = store, dict[str, Path]()
        bound = cache_bytes(os.environ) if limit_bytes is None else limit_bytes
        self._cache = SnapshotCache(cache_dir, limit_bytes=bound)
        self._objects = {item.key: item for item in self.manifest.objects}

    def path(self, name: str) -> Path:
        """Return where the object lies, verified; raises SnapshotDamaged naming it where a byte is another."""
        if name not in self._objects:
            raise IntegrityError(f"{_key(self.snapshot_id, 'snapshot.json')}: names no {name}")
        if name not in self._verified:
            key = _key(self.snapshot_id, name)
            try:
                self._verified[name] = self._fetched(key, _promised(self.snapshot_id, self._objects[name]))
            except IntegrityError as error:
                advice = f"delete data/{self.snapshot_id} and build it again"
                raise SnapshotDamaged(f"{error}; {advice}") from error
        return self._verified[name]

    def shards(self, split: SplitName) -> tuple[VerifiedShard, ...]:
        """Return the shards of a split in order; raises IntegrityError where they hold another number of tokens."""
        items = self._shard_objects(split)
        shards = tuple(self._shard(item) for item in items)
        held, promised = sum(map(len, shards)), self.manifest.split(split).tokens
        if held != promised:
            raise IntegrityError(
                f"data/{self.snapshot_id}: {split} shards hold {held} tokens, the manifest says {promised}"
            )
        return shards

    def at_hand(self, split: SplitName) -> tuple[Path, ...]:
        """Return where the shards of a split lie, as far as they are on this machine."""
        keys = [(_key(self.snapshot_id, item.key), item.key) for item in self._shard_objects(split)]
        paths = [self._store.local_path(key) or self._verified.get(name) for key, name in keys]
        return tuple(path for path in paths if path is not None)

    def _shard_objects(self, split: SplitName) -> list[SnapshotObject]:
        return [self._objects[name] for name in sorted(self._objects) if name.startswith(f"{split}-")]

    def _shard(self, item: SnapshotObject) -> VerifiedShard:
        schema, where = self.manifest.shard_schema, _key(self.snapshot_id, item.key)
        tokens = item.tokens
        if tokens is None:  # a manifest of before the field: only the shard itself can tell
            tokens = len(map_shard(self.path(item.key), schema, where=where))
        return VerifiedShard(partial(self.path, item.key), schema, tokens=tokens, where=where)

    def _fetched(self, key: str, promised: ExpectedObject) -> Path:
        path = self._store.local_path(key)
        if path is None:
            return self._cache.fetch(self._store, promised)
        check_object(self._store, promised)
        return path


def open_snapshot(
    store: ObjectStore,
    snapshot_id: str,
    cache_dir: Path,
    *,
    eager_bytes: int = EAGER_BYTES,
    limit_bytes: int | None = None,
) -> OpenSnapshot:
    """Open a snapshot so that no byte of it is used before it was hashed.

    Up to `eager_bytes` in all are hashed now; of a larger snapshot each shard when its first token is asked for, and
    the document index when it is read. A store without local files has its objects kept in ``cache_dir``, within
    `limit_bytes` (what CAIRN_CACHE_BYTES says where None). Raises SnapshotDamaged naming the object that does not
    verify.
    """
    files = SnapshotFiles(store, snapshot_id, cache_dir, limit_bytes=limit_bytes)
    train, val = files.shards("train"), files.shards("val")
    if sum(item.bytes for item in files.manifest.objects) <= eager_bytes:
        for item in files.manifest.objects:
            files.path(item.key)
        for shard in (*train, *val):
            shard.tokens()
    return OpenSnapshot(
        snapshot_id=snapshot_id,
        manifest=files.manifest,
        tokenizer_json=files.path(TOKENIZER).read_text(encoding="utf-8"),
        train=train,
        val=val,
        train_files=files.at_hand("train"),
    )


def _is_sound(store: ObjectStore, snapshot_id: str, item: SnapshotObject) -> bool:
    try:
        check_object(store, _promised(snapshot_id, item))
    except IntegrityError:
        return False
    return True


def _key(snapshot_id: str, name: str) -> str:
    return f"data/{snapshot_id}/{name}"


def _promised(snapshot_id: str, item: SnapshotObject) -> ExpectedObject:
    return ExpectedObject(key=_key(snapshot_id, item.key), bytes=item.bytes, sha256=item.sha256)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _describe(path: Path) -> SnapshotObject:
    found = describe_file(path)
    tokens = count_tokens(path) if path.suffix == SHARD_SUFFIX else None
    return SnapshotObject(key=path.name, bytes=found.bytes, sha256=found.sha256, tokens=tokens)


def _upload(store: ObjectStore, key: str, path: Path, item: SnapshotObject) -> None:
    written = store.write_stream(key, _chunks(path))
    if (written.bytes, written.sha256) != (item.bytes, item.sha256):
        raise _damaged(key, written.sha256, item.sha256)


def _damaged(key: str, found: str, expected: str) -> IntegrityError:
    folder = key.rpartition("/")[0]
    return IntegrityError(f"{key}: sha256 is {found}, expected {expected}; delete {folder} and build it again")
