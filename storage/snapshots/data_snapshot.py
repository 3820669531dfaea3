"""A data snapshot below `data/<snapshot_id>/`: token shards, tokenizer, document index, and the manifest.

The id is the SHA-256 of `snapshot.json`, which is written last, so that an incomplete snapshot is invisible. Objects of
a remote store are copied to a bounded folder of this machine under their SHA-256. Parts of a text below
`data/parts/<id>/`, their list last, are no record: equal ids have equal rows, and may be deleted at any time.
"""

import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from cairn.storage.errors import IntegrityError, ObjectDamaged, ObjectMissing, SnapshotDamaged
from cairn.storage.snapshots.snapshot_manifest import SnapshotManifest, SnapshotObject, SplitName
from cairn.storage.snapshots.token_shard import SHARD_SUFFIX, VerifiedShard, count_tokens
from cairn.storage.stores import codec, object_store
from cairn.storage.stores.object_store import ExpectedObject, ObjectStore

TOKENIZER = "tokenizer.json"
DOCUMENTS = "documents.parquet"
REJECTED = "rejected.parquet"
ANSWERS = "answers-"
"""Before the name of a split the name of shards that say which of its tokens are an answer's."""
CACHE_BYTES = 50_000_000_000
EAGER_BYTES = 64 * 1024 * 1024
_YOUNG_SECONDS, ABANDONED_SECONDS = 3600.0, 14 * 24 * 3600.0
"""Work on a snapshot that is older than the latter is nobody's any more."""
_PARTS = "data/parts"
_PUBLISHING_THREADS = 2
"""Files that are hashed or uploaded at once."""
_COPY, _TEMPORARY = re.compile(r"[0-9a-f]{64}\Z"), re.compile(r"\.[0-9a-f]{64}-[0-9a-f]{32}\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSnapshot:
    """A snapshot to train on: rows (N_k,) and tokenizer JSON; a damaged row raises SnapshotDamaged at its first use.

    The answers say which tokens of a split the loss counts; none where it counts all.
    """

    manifest: SnapshotManifest
    tokenizer_json: str
    train: tuple[VerifiedShard, ...]
    val: tuple[VerifiedShard, ...]
    train_answers: tuple[VerifiedShard, ...] = ()
    val_answers: tuple[VerifiedShard, ...] = ()


def publish_snapshot(store: ObjectStore, folder: Path, manifest: SnapshotManifest) -> tuple[str, SnapshotManifest]:
    """Upload `folder`, `snapshot.json` last, idempotent; returns id and manifest. IntegrityError for other bytes."""
    with ThreadPoolExecutor(_PUBLISHING_THREADS, thread_name_prefix="publish") as pool:
        objects = tuple(pool.map(_describe, sorted(path for path in folder.iterdir() if path.is_file())))
        data = codec.encode(full := replace(manifest, objects=objects))
        snapshot_id = codec.sha256(data)
        marker = _key(snapshot_id, "snapshot.json")
        if store.size(marker) is None:
            list(pool.map(lambda item: _upload(store, _key(snapshot_id, item.key), folder / item.key, item), objects))
            store.write(marker, data)  # concurrent writers write the same bytes
    if store.read(marker) != data:
        raise IntegrityError(f"{marker}: is not what its name says; delete data/{snapshot_id} and run again")
    return snapshot_id, full


def _describe(path: Path) -> SnapshotObject:
    found, tokens = object_store.describe_file(path), count_tokens(path) if path.suffix == SHARD_SUFFIX else None
    return SnapshotObject(key=path.name, bytes=found.bytes, sha256=found.sha256, tokens=tokens)


def read_manifest(store: ObjectStore, snapshot_id: str) -> SnapshotManifest:
    """Return a snapshot's manifest; raises ObjectMissing, or IntegrityError if it is damaged."""
    key = _key(snapshot_id, "snapshot.json")
    try:
        data = store.read(key)
    except ObjectMissing as missing:
        raise ObjectMissing(f"{key}: no such data snapshot; build it again from its sources") from missing
    if codec.sha256(data) != snapshot_id:
        raise _damaged(key, codec.sha256(data), snapshot_id)
    return codec.decode(data, SnapshotManifest, where=key)


def list_snapshots(store: ObjectStore) -> tuple[str, ...]:
    """Return the ids of the store's snapshots, sorted, incomplete ones included."""
    return tuple(name for key in store.folders("data") if len(name := key.rpartition("/")[2]) == 64)


def find_damage(store: ObjectStore, snapshot_id: str) -> Iterator[tuple[SnapshotObject, ObjectDamaged]]:
    """Yield the missing and damaged objects of a snapshot, and what is wrong with them; reads every byte."""
    for item in read_manifest(store, snapshot_id).objects:
        if damage := object_store.find_damage(store, _expected(snapshot_id, item)):
            yield item, damage


def drop_damaged_copies(cache_dir: Path, manifest: SnapshotManifest) -> tuple[str, ...]:
    """Delete damaged copies of a snapshot's objects from the cache; returns the objects' keys in the snapshot."""
    damaged = list[str]()
    for item in manifest.objects:
        path = cache_dir / item.sha256
        if path.is_file() and not _is_intact(path, _expected("cache", item)):
            path.unlink(missing_ok=True)
            damaged.append(item.key)
    return tuple(damaged)


def replace_object(store: ObjectStore, snapshot_id: str, item: SnapshotObject, path: Path) -> None:
    """Upload `path` over a damaged object; raises SnapshotDamaged, before that, if the file is a different one."""
    found, key = object_store.describe_file(path), _key(snapshot_id, item.key)
    if not found.has_bytes_of(item):
        difference = f"sha256 {found.sha256[:12]}… instead of {item.sha256[:12]}…"
        raise SnapshotDamaged(f"{key}: damaged, and its sources give other bytes now: {difference}")
    _upload(store, key, path, item)


class SnapshotFiles:
    """A snapshot's objects as files, verified at first use; cached copies of remote ones stay while this is in use."""

    def __init__(self, store: ObjectStore, snapshot_id: str, cache: Path) -> None:
        """Read the manifest; `CACHE_BYTES` bounds the cache."""
        self.manifest, self.snapshot_id = read_manifest(store, snapshot_id), snapshot_id
        self._store, self._verified = store, dict[str, Path]()
        self._cache = SnapshotCache(cache, limit_bytes=CACHE_BYTES)
        self._objects = {item.key: item for item in self.manifest.objects}

    def path(self, name: str) -> Path:
        """Return the object's verified file; raises SnapshotDamaged."""
        if name not in self._objects:
            raise IntegrityError(f"{_key(self.snapshot_id, 'snapshot.json')}: names no {name}")
        if name not in self._verified:
            try:
                self._verified[name] = self._cache.fetch(self._store, _expected(self.snapshot_id, self._objects[name]))
            except IntegrityError as error:
                raise SnapshotDamaged(f"{error}; delete data/{self.snapshot_id} and build it again") from error
        return self._verified[name]

    def answers(self, split: SplitName) -> tuple[VerifiedShard, ...]:
        """Return which tokens of a split are an answer's, as `shards` does; none where there are no conversations."""
        has_answers = not isinstance(self.manifest.answers, msgspec.UnsetType)
        return self.shards(split, ANSWERS) if has_answers else ()

    def shards(self, split: SplitName, kind: str = "") -> tuple[VerifiedShard, ...]:
        """Return the shards of a split in order; raises IntegrityError if their tokens are not the manifest's."""
        shards, schema = list[VerifiedShard](), replace(self.manifest.shard_schema, is_mask=bool(kind))
        for item in (self._objects[name] for name in sorted(self._objects) if name.startswith(f"{kind}{split}-")):
            where, fetch = _key(self.snapshot_id, item.key), partial(self.path, item.key)
            if item.tokens is None:
                raise IntegrityError(f"{where}: the manifest does not say how many tokens it holds")
            shards.append(VerifiedShard(fetch, schema, tokens=item.tokens, where=where))
        found, expected = sum(map(len, shards)), self.manifest.split(split).tokens
        if found != expected:
            problem = f"{kind}{split} shards hold {found} tokens, the manifest says {expected}"
            raise IntegrityError(f"data/{self.snapshot_id}: {problem}")
        return tuple(shards)


def open_snapshot(store: ObjectStore, snapshot_id: str, cache_dir: Path) -> OpenSnapshot:
    """Open a snapshot; no byte of it is used before it is verified. Raises SnapshotDamaged.

    A snapshot of at most `EAGER_BYTES` is verified now, a shard of a larger one at its first use. Objects of a remote
    store are kept in `cache_dir` within `CACHE_BYTES`.
    """
    manifest = (files := SnapshotFiles(store, snapshot_id, cache_dir)).manifest
    train, val = files.shards("train"), files.shards("val")
    answers, val_answers = files.answers("train"), files.answers("val")
    if sum(item.bytes for item in manifest.objects) <= EAGER_BYTES:
        for item in manifest.objects:
            files.path(item.key)
        for shard in (*train, *val, *answers, *val_answers):
            shard.tokens()
    answers, document = files.answers("train"), files.path(TOKENIZER).read_text(encoding="utf-8")
    return OpenSnapshot(
        manifest=manifest, tokenizer_json=document, train=train, val=val, train_answers=answers, val_answers=val_answers
    )


def publish_parts(store: ObjectStore, parts_id: str, paths: Iterable[Path]) -> None:
    """Upload finished parts, and their list last; raises IntegrityError."""
    parts = list[SnapshotObject]()
    for path in paths:
        found = object_store.describe_file(path)
        part = SnapshotObject(key=f"{found.sha256}{SHARD_SUFFIX}", bytes=found.bytes, sha256=found.sha256)
        _upload(store, f"{_PARTS}/{parts_id}/{part.key}", path, part)
        parts.append(part)
    store.write(f"{_PARTS}/{parts_id}/parts.json", codec.encode(parts))


def find_parts(store: ObjectStore, parts_id: str) -> tuple[ExpectedObject, ...] | None:
    """Return the parts of an id; None if they are no whole, or their list is damaged."""
    key = f"{_PARTS}/{parts_id}/parts.json"
    with suppress(ObjectMissing, IntegrityError):
        parts = codec.decode(store.read(key), tuple[SnapshotObject, ...], where=key)
        return tuple(_expected(f"parts/{parts_id}", part) for part in parts)
    return None


def has_parts(store: ObjectStore, parts_id: str) -> bool:
    """Whether all parts of an id are there and intact; reads every byte."""
    parts = find_parts(store, parts_id)
    return parts is not None and not any(object_store.find_damage(store, part) for part in parts)


def sweep_parts(store: ObjectStore) -> None:
    """Delete the parts that are two weeks old, their lists first, and what killed uploads of data left."""
    for write in store.unfinished("data"):
        if write.age_seconds > ABANDONED_SECONDS:
            store.discard(write)
    for folder in store.folders(_PARTS):
        if (key := store.first(folder)) and (store.age_seconds(key) or 0.0) > ABANDONED_SECONDS:
            store.delete(f"{folder}/parts.json")
            store.delete_all(store.keys(folder))


def _key(snapshot_id: str, name: str) -> str:
    return f"data/{snapshot_id}/{name}"


def _expected(snapshot_id: str, item: SnapshotObject) -> ExpectedObject:
    return ExpectedObject(key=_key(snapshot_id, item.key), bytes=item.bytes, sha256=item.sha256)


def _upload(store: ObjectStore, key: str, path: Path, item: SnapshotObject) -> None:
    with path.open("rb") as file:
        chunks = iter(partial(file.read, object_store.READ_CHUNK_BYTES), b"")
        written = object_store.write_hashed(store, key, chunks)
    if not written.has_bytes_of(item):
        raise _damaged(key, written.sha256, item.sha256)


def _damaged(key: str, found: str, expected: str) -> IntegrityError:
    folder = key.rpartition("/")[0]
    return IntegrityError(f"{key}: sha256 is {found}, expected {expected}; delete {folder} and build it again")


class SnapshotCache:
    """A folder of verified copies; safe for many threads and processes at once."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes

    def fetch(self, store: ObjectStore, expected: ExpectedObject) -> Path:
        """Return a verified file: a local store's own, else a copy, kept for an hour; raises IntegrityError."""
        if (own := store.local_path(expected.key)) is not None:
            object_store.check_object(store, expected)
            return own
        path, temporary = self._folder / expected.sha256, self._folder / f".{expected.sha256}-{uuid.uuid4().hex}"
        with _lock_folder(self._folder), suppress(FileNotFoundError):
            os.utime(path)  # nobody deletes it from now on
        if _is_intact(path, expected):
            return path
        # Delete the least recently used copies that are not young, until the object fits.
        with _lock_folder(self._folder):
            copies, young_from = [], time.time() - _YOUNG_SECONDS
            for item in os.scandir(self._folder):
                with suppress(FileNotFoundError):  # a download has come to its end
                    status = item.stat()
                    if _COPY.match(item.name):
                        copies.append((status.st_mtime, status.st_size, Path(item.path)))
                    elif _TEMPORARY.match(item.name) and status.st_mtime < young_from:
                        Path(item.path).unlink()  # of a dead process
            excess_bytes = sum(size_bytes for _, size_bytes, _ in copies) + expected.bytes - self._limit_bytes
            for used_at, size_bytes, copy in sorted(copies):
                if excess_bytes > 0 and used_at < young_from:
                    copy.unlink(missing_ok=True)
                    excess_bytes -= size_bytes
        try:
            object_store.save_verified(store, expected, temporary)
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return path


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_intact(path: Path, expected: ExpectedObject) -> bool:
    with suppress(FileNotFoundError):
        return object_store.describe_file(path).has_bytes_of(expected)
    return False
