"""Checkpoints: stage payload and manifest, commit with one log entry, load only what verifies."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from cairn.storage.checkpoints import checkpoint_shard, payload
from cairn.storage.checkpoints.checkpoint_shard import ReadPolicy, ShardReader, WantedBytes, cut_shards, transfers
from cairn.storage.errors import IntegrityError, ObjectDamaged, ObjectMissing, StoreUnavailable
from cairn.storage.logs import run_entries, run_log
from cairn.storage.logs.log_entry import CheckpointReference, Writer
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.codec import decode, encode, sha256
from cairn.storage.stores.object_store import ExpectedObject, ObjectStore, find_damage, read_verified

UNREADABLE = "cannot be read"
"""How the finding begins where the store had no answer for an object."""
_LARGE_BYTES = 64 * 1024 * 1024
"""Below this, starting threads takes longer than reading."""
_POLICY = ReadPolicy()


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """Tensors that share one shard name, such as `weights` or `optimizer`."""

    name: str
    records: tuple[payload.TensorRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointTarget:
    """Where a checkpoint is staged: its run, the attempt that writes it, and its folder."""

    run_id: str
    attempt: int
    prefix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadOptions:
    """How shards are uploaded: their size, how many at once, and what each upload thread calls first."""

    shard_bytes: int = 512 * 1024 * 1024
    at_once: int = 1
    thread_start: Callable[[], None] | None = None


_DEFAULT_UPLOADS = UploadOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedCheckpoint:
    """A checkpoint whose manifest and trainer document are verified; `tensors` are read by `load_checkpoint` alone."""

    reference: CheckpointReference
    manifest: payload.Manifest
    trainer: payload.TrainerDocument
    tensors: tuple[payload.TensorRecord, ...] = ()


def checkpoint_target(run_id: str, *, step: int, attempt: int) -> CheckpointTarget:
    """Return where an attempt stages the checkpoint of a step: no two attempts share a folder."""
    prefix = f"{run_log.run_prefix(run_id)}/checkpoints/step-{step:08d}-attempt-{attempt:04d}"
    return CheckpointTarget(run_id=run_id, attempt=attempt, prefix=prefix)


def stage_share(
    store: ObjectStore,
    prefix: str,
    groups: Sequence[TensorGroup],
    *,
    writer: int,
    writers: int,
    uploads: UploadOptions = _DEFAULT_UPLOADS,
) -> tuple[payload.ManifestShard, ...]:
    """Upload the share of one of several writers, `writer` counted from 0; `stage_checkpoint` writes the manifest."""
    start = partial(transfers, uploads.at_once, uploads.thread_start)
    with start() as write, start() as digest:
        waits = list[Callable[[], payload.ManifestShard]]()
        for group in groups:
            if writers > 1 and not group.records:
                continue
            part = f"{group.name}-writer-{writer + 1}-of-{writers}" if writers > 1 else group.name
            shards = cut_shards(group.records, uploads.shard_bytes)
            for number, shard in enumerate(shards, start=1):
                name = f"{part}-{number:05d}-of-{len(shards):05d}.safetensors"
                waits.append(checkpoint_shard.begin_shard(write, digest, store, f"{prefix}/{name}", shard))
        return tuple(wait() for wait in waits)


def stage_checkpoint(
    store: ObjectStore,
    target: CheckpointTarget,
    groups: Sequence[TensorGroup],
    trainer: payload.TrainerDocument,
    *,
    uploads: UploadOptions = _DEFAULT_UPLOADS,
    writers: int = 1,
    others: Callable[[], tuple[payload.ManifestShard, ...]] = tuple,
) -> run_entries.StagedCheckpoint:
    """Upload shards, trainer document and, last, the manifest; `others` waits for what the other writers wrote."""
    prefix, document = target.prefix, encode(trainer)
    shards = stage_share(store, prefix, groups, writer=0, writers=writers, uploads=uploads)
    store.write(f"{prefix}/{payload.TRAINER}", document)
    shards += others()
    digest = payload.state_sha256([*(tensor for shard in shards for tensor in shard.tensors), *trainer.tensors])
    item = payload.ManifestObject(name=payload.TRAINER, bytes=len(document), sha256=sha256(document))
    run_id, attempt, step, version = target.run_id, target.attempt, trainer.step, payload.MANIFEST_VERSION
    manifest = payload.Manifest(
        version=version, run_id=run_id, attempt=attempt, step=step, state_sha256=digest, trainer=item, shards=shards
    )
    data = encode(manifest)
    store.write(f"{prefix}/manifest.json", data)
    size, name = sum(item.bytes for item in manifest.objects) + len(data), sha256(data)
    return run_entries.StagedCheckpoint(
        step=step, attempt=attempt, prefix=prefix, manifest_sha256=name, state_sha256=digest, bytes=size
    )


def commit_checkpoint(
    log: run_log.RunLog, staged: run_entries.StagedCheckpoint, *, writer: Writer, tokens: int, gpu_seconds: float
) -> RunState:
    """Check the sizes of the staged objects, which may raise `IntegrityError`, then append the atomic marker once."""
    manifest = read_manifest(log.store, staged)
    if wrong := find_wrong_sizes(log.store, staged.prefix, manifest):
        raise wrong[0]
    body = run_entries.CheckpointCommitted(**asdict(staged), tokens=tokens, gpu_seconds=gpu_seconds)
    return log.append(partial(_unless_committed, body), writer=writer)


def read_manifest(store: ObjectStore, reference: CheckpointReference) -> payload.Manifest:
    """Return the manifest; raise `IntegrityError` unless it has the digest in the log and says what the log says."""
    key, expected = f"{reference.prefix}/manifest.json", reference.manifest_sha256
    try:
        data = store.read(key)
    except ObjectMissing as missing:
        raise ObjectDamaged(key, expected=expected, found="missing") from missing
    if sha256(data) != expected:
        raise ObjectDamaged(key, expected=expected, found=f"sha256 is {sha256(data)}")
    manifest = payload.decode_manifest(data, where=key)
    for field, found, said in _facts(manifest, reference):
        if found != said:
            raise ObjectDamaged(key, expected=f"{field} {said}, as the log says", found=f"is of {field} {found}")
    return manifest


def find_wrong_sizes(store: ObjectStore, prefix: str, manifest: payload.Manifest) -> tuple[ObjectDamaged, ...]:
    """Return which objects are missing or have another size than the manifest says; reads none of them."""
    sizes, damaged = store.sizes(prefix), list[ObjectDamaged]()
    for item in manifest.objects:
        if (size := sizes.get(key := f"{prefix}/{item.name}")) != item.bytes:
            found = "missing" if size is None else f"{size} bytes in the store"
            damaged.append(ObjectDamaged(key, expected=f"{item.bytes} bytes", found=found))
    return tuple(damaged)


def verify_checkpoint(
    store: ObjectStore, reference: CheckpointReference, *, only: Collection[str] = (), sizes_only: bool = False
) -> tuple[ObjectDamaged, ...]:
    """Return what is wrong with each object that does not read as promised; none means that the checkpoint verifies.

    With `only`, these keys are read and no others, beside the manifest; with `sizes_only` nothing but the manifest is.
    Objects are read in pieces, so little memory is needed. An object for which the store has no answer counts as one
    that cannot be read.
    """
    try:
        manifest = read_manifest(store, reference)
        if sizes_only:
            return find_wrong_sizes(store, reference.prefix, manifest)
        objects = [item for item in manifest.objects if not only or f"{reference.prefix}/{item.name}" in only]
        with transfers(_at_once(item.bytes for item in objects)) as run:
            checks = [run(_find_damage, store, reference.prefix, item) for item in objects]
            damages = tuple(damage for check in checks if (damage := check()) is not None)
        if not damages and not only:
            open_checkpoint(store, reference, manifest, read_policy=ReadPolicy(tries=1))
        return damages
    except (IntegrityError, StoreUnavailable) as error:
        expected = reference.manifest_sha256, "a manifest of this version"
        return (_damage_of(f"{reference.prefix}/manifest.json", expected, error),)


def open_checkpoint(
    store: ObjectStore,
    reference: CheckpointReference,
    known: payload.Manifest | None = None,
    *,
    read_policy: ReadPolicy = _POLICY,
) -> OpenedCheckpoint:
    """Read and verify manifest, unless it is `known`, and trainer document, and recompute the state's digest.

    `IntegrityError` names what does not verify.
    """
    key = f"{reference.prefix}/manifest.json"
    manifest = known or read_policy.call(store, key, lambda: read_manifest(store, reference))
    expected = _expected(reference.prefix, manifest.trainer)
    document = read_policy.call(store, expected.key, lambda: read_verified(store, expected))
    trainer = decode(bytes(document), payload.TrainerDocument, where=expected.key)
    if trainer.step != manifest.step:
        raise IntegrityError(f"{expected.key}: is of step {trainer.step}, its manifest of step {manifest.step}")
    if payload.state_sha256([*manifest.tensors, *trainer.tensors]) != manifest.state_sha256:
        raise IntegrityError(f"{reference.prefix}: tensors do not digest to the manifest's state_sha256")
    return OpenedCheckpoint(reference=reference, manifest=manifest, trainer=trainer)


def read_tensors(
    store: ObjectStore, opened: OpenedCheckpoint, wanted: Iterable[WantedBytes], *, read_policy: ReadPolicy = _POLICY
) -> None:
    """Read and verify parts of a checkpoint's tensors; raises `ObjectDamaged` for what fails every read."""
    by_name, scratch, reads = {item.name: item for item in wanted}, threading.local(), list[Callable[[], None]]()
    with transfers(_at_once(item.end - item.begin for item in by_name.values())) as run:
        for shard in opened.manifest.shards:
            if parts := [by_name[tensor.name] for tensor in shard.tensors if tensor.name in by_name]:
                reader = ShardReader(store, f"{opened.reference.prefix}/{shard.name}", shard, read_policy, scratch)
                reads += reader.begin(run, parts)
        for read in reads:
            read()


def load_checkpoint(
    store: ObjectStore, reference: CheckpointReference, *, group: str = "", read_policy: ReadPolicy = _POLICY
) -> OpenedCheckpoint:
    """Read and verify a checkpoint, or a `group` of its shards, into new memory; `IntegrityError` names a bad one."""
    opened = open_checkpoint(store, reference, read_policy=read_policy)
    shards = sorted(opened.manifest.shards, key=lambda shard: shard.name)
    specs = [tensor for shard in shards if shard.name.startswith(group) for tensor in shard.tensors]
    memories = (memoryview(np.empty(spec.bytes, np.uint8).data) for spec in specs)  # numpy asks for huge pages
    records = tuple(map(payload.with_data, specs, memories))
    parts = [WantedBytes(name=item.name, begin=0, end=item.data.nbytes, memory=item.data) for item in records]
    read_tensors(store, opened, parts, read_policy=read_policy)
    return replace(opened, tensors=records)


def _unless_committed(body: run_entries.CheckpointCommitted, state: RunState) -> run_entries.CheckpointCommitted | None:
    known = state.find_commit(body)
    return None if known is not None and known.committed.manifest_sha256 == body.manifest_sha256 else body


def _facts(manifest: payload.Manifest, reference: CheckpointReference) -> Iterator[tuple[str, object, object]]:
    """Yield what a manifest says beside what the log says: of the state only where the reference knows it."""
    yield "step", manifest.step, reference.step
    yield "attempt", manifest.attempt, reference.attempt
    yield "run", run_log.run_prefix(manifest.run_id), reference.prefix.rpartition("/checkpoints/")[0]
    if isinstance(reference, run_entries.StagedCheckpoint):
        yield "state_sha256", manifest.state_sha256, reference.state_sha256


def _at_once(sizes: Iterable[int]) -> int:
    return 4 if sum(sizes) >= _LARGE_BYTES else 1


def _find_damage(store: ObjectStore, prefix: str, item: payload.ManifestObject) -> ObjectDamaged | None:
    try:
        if not isinstance(item, payload.ManifestShard):
            return find_damage(store, _expected(prefix, item))
        whole = [WantedBytes(name=tensor.name, begin=0, end=tensor.bytes) for tensor in item.tensors]
        reader = ShardReader(store, f"{prefix}/{item.name}", item, ReadPolicy(tries=1), threading.local())
        with transfers(1) as run:
            reader.begin(run, whole)
    except (IntegrityError, StoreUnavailable) as error:
        return _damage_of(f"{prefix}/{item.name}", (item.sha256, "the tensors of the manifest"), error)
    return None


def _damage_of(key: str, expected: tuple[str, str], error: IntegrityError | StoreUnavailable) -> ObjectDamaged:
    """Return what the error says of an object of which a digest, and something valid, is expected."""
    if isinstance(error, StoreUnavailable):
        return ObjectDamaged(key, expected=expected[0], found=f"{UNREADABLE}: {error}")
    return error if isinstance(error, ObjectDamaged) else ObjectDamaged(key, expected=expected[1], found=str(error))


def _expected(prefix: str, item: payload.ManifestObject) -> ExpectedObject:
    return ExpectedObject(key=f"{prefix}/{item.name}", bytes=item.bytes, sha256=item.sha256)
