"""Checkpoints: stage payload and manifest, commit with one log entry, load only what verifies."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from storage.checkpoints.checkpoint_documents import (
    MANIFEST_VERSION,
    Manifest,
    ManifestObject,
    TrainerDocument,
    decode_manifest,
)
from storage.checkpoints.shard_transfer import (
    Buffers,
    arriving,
    begin_reads,
    cut_shards,
    fresh_buffers,
    in_name_order,
    name_of,
    transfers,
    write_pieces,
)
from storage.checkpoints.tensor_record import TensorRecord, state_sha256
from storage.checkpoints.tensor_shard import shard_chunks
from storage.errors import IntegrityError, ObjectDamaged, ObjectMissing, StoreUnavailable
from storage.logs.log_entry import CheckpointReference, Writer
from storage.logs.run_entries import CheckpointCommitted
from storage.logs.run_log import RunLog, run_prefix
from storage.logs.run_state import RunState
from storage.stores.document import decode, encode, sha256
from storage.stores.object_store import ObjectStore
from storage.stores.verified_object import ExpectedObject, find_damage, read_verified

TRAINER = "trainer.json"
UNREADABLE = "cannot be read"
"""How the finding begins where the store had no answer for an object."""
_CHECKS = 4
_LARGE_BYTES = 64 * 1024 * 1024
"""Below this, starting threads takes longer than checking the checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """Tensors that share one shard name, such as `weights` or `optimizer`."""

    name: str
    records: tuple[TensorRecord, ...]


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
class OtherWriters:
    """The other writers of a shared checkpoint: their number, the digest of the whole state, and what they wrote."""

    count: int
    digest: Callable[[], str]
    written: Callable[[], tuple[ManifestObject, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedCheckpoint:
    """A complete upload, ignored by readers until it is committed; also the trainer's message that it is staged."""

    step: int
    attempt: int
    prefix: str
    manifest_sha256: str
    state_sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """A verified checkpoint: every byte has the digest in the log."""

    reference: CheckpointReference
    state_sha256: str
    trainer: TrainerDocument
    tensors: tuple[TensorRecord, ...]


def checkpoint_prefix(run_folder: str, *, step: int, attempt: int) -> str:
    """Return the folder of a checkpoint; it contains the attempt, so that no two attempts share one."""
    return f"{run_folder}/checkpoints/step-{step:08d}-attempt-{attempt:04d}"


def checkpoint_target(run_id: str, *, step: int, attempt: int) -> CheckpointTarget:
    """Return where an attempt stages the checkpoint of a step."""
    prefix = checkpoint_prefix(run_prefix(run_id), step=step, attempt=attempt)
    return CheckpointTarget(run_id=run_id, attempt=attempt, prefix=prefix)


def stage_share(
    store: ObjectStore,
    prefix: str,
    groups: Sequence[TensorGroup],
    *,
    writer: int,
    writers: int,
    uploads: UploadOptions = _DEFAULT_UPLOADS,
) -> tuple[ManifestObject, ...]:
    """Upload the share of one of several writers, `writer` counted from 0; `stage_checkpoint` writes the manifest."""
    shards = _named_shards(groups, uploads.shard_bytes, writer, writers)
    with transfers(uploads.at_once, uploads.thread_start) as run:
        writes = [run(_write_object, store, prefix, name, shard_chunks(shard)) for name, shard in shards]
        return tuple(written() for written in writes)


def stage_checkpoint(
    store: ObjectStore,
    target: CheckpointTarget,
    groups: Sequence[TensorGroup],
    trainer: TrainerDocument,
    *,
    uploads: UploadOptions = _DEFAULT_UPLOADS,
    others: OtherWriters | None = None,
) -> StagedCheckpoint:
    """Upload shards, trainer document and, last, the manifest, which waits for what `others` write."""
    writers, prefix = 1 if others is None else others.count + 1, target.prefix
    records = [*(record for group in groups for record in group.records), *trainer.records()]
    shards = _named_shards(groups, uploads.shard_bytes, 0, writers)
    with transfers(uploads.at_once, uploads.thread_start) as run:
        digest = run(state_sha256, sorted(records, key=name_of)) if others is None else others.digest
        writes = [run(_write_object, store, prefix, name, shard_chunks(shard)) for name, shard in shards]
        writes.append(run(_write_object, store, prefix, TRAINER, [memoryview(encode(trainer))]))
        objects, state_digest = tuple(written() for written in writes), digest()
    objects += () if others is None else others.written()
    manifest = Manifest(
        version=MANIFEST_VERSION,
        run_id=target.run_id,
        attempt=target.attempt,
        step=trainer.step,
        state_sha256=state_digest,
        objects=objects,
    )
    data = encode(manifest)
    store.write(f"{prefix}/manifest.json", data)
    return StagedCheckpoint(
        step=trainer.step,
        attempt=target.attempt,
        prefix=prefix,
        manifest_sha256=sha256(data),
        state_sha256=state_digest,
        bytes=sum(item.bytes for item in objects) + len(data),
    )


def commit_checkpoint(
    log: RunLog, staged: StagedCheckpoint, *, writer: Writer, tokens: int, gpu_seconds: float
) -> RunState:
    """Check the sizes of the staged objects against their manifest, then append the commit entry: the atomic marker.

    Appends it once. Raises `IntegrityError` when objects are missing or incomplete, `Fenced` by a newer attempt.
    """
    manifest = read_manifest(log.store, staged.prefix, staged.manifest_sha256)
    sizes = log.store.sizes(staged.prefix)
    for item in manifest.objects:
        if (size := sizes.get(f"{staged.prefix}/{item.name}")) != item.bytes:
            raise IntegrityError(f"{staged.prefix}/{item.name}: {size} bytes in the store, manifest says {item.bytes}")
    body = CheckpointCommitted(**asdict(staged), tokens=tokens, gpu_seconds=gpu_seconds)
    return log.append(partial(_unless_committed, body), writer=writer)


def read_manifest(store: ObjectStore, prefix: str, manifest_sha256: str) -> Manifest:
    """Return the manifest under `prefix`; raise `IntegrityError` unless it has the digest in the log."""
    key = f"{prefix}/manifest.json"
    try:
        data = store.read(key)
    except ObjectMissing as missing:
        raise ObjectDamaged(key, expected=manifest_sha256, found="missing") from missing
    if sha256(data) != manifest_sha256:
        raise ObjectDamaged(key, expected=manifest_sha256, found=f"sha256 is {sha256(data)}")
    return decode_manifest(data, where=key)


def verify_checkpoint(
    store: ObjectStore, reference: CheckpointReference, *, only: Collection[str] = ()
) -> tuple[ObjectDamaged, ...]:
    """Return what is wrong with each object that does not read as promised; none means that the checkpoint verifies.

    With `only`, these keys are read and no others, beside the manifest. Objects are read in pieces, so little memory is
    needed. An object for which the store has no answer counts as one that cannot be read.
    """
    try:
        manifest = read_manifest(store, reference.prefix, reference.manifest_sha256)
    except ObjectDamaged as damage:
        return (damage,)
    except StoreUnavailable as error:
        return (_unreadable(f"{reference.prefix}/manifest.json", reference.manifest_sha256, error),)
    except IntegrityError as error:
        key = f"{reference.prefix}/manifest.json"
        return (ObjectDamaged(key, expected="a manifest of this version", found=str(error)),)
    objects = [_expected(reference.prefix, item) for item in manifest.objects]
    objects = [expected for expected in objects if not only or expected.key in only]
    at_once = _CHECKS if sum(expected.bytes for expected in objects) >= _LARGE_BYTES else 1
    with transfers(at_once) as run:
        checks = [run(_find_damage, store, expected) for expected in objects]
        found = [check() for check in checks]
    return tuple(damage for damage in found if damage is not None)


def load_checkpoint(
    store: ObjectStore,
    reference: CheckpointReference,
    *,
    group: str = "",
    downloads: int = 1,
    buffers: Buffers = fresh_buffers,
) -> LoadedCheckpoint:
    """Read and verify a checkpoint, or a `group` of its shards, into `buffers`; `IntegrityError` names a bad one."""
    manifest = read_manifest(store, reference.prefix, reference.manifest_sha256)
    if manifest.step != reference.step:
        raise IntegrityError(f"{reference.prefix}: manifest is of step {manifest.step}, the log says {reference.step}")
    shards = [item for item in manifest.objects if item.name != TRAINER and item.name.startswith(group)]
    documents = [item for item in manifest.objects if item.name == TRAINER]
    if not documents:
        raise IntegrityError(f"{reference.prefix}: manifest names no {TRAINER}")
    expected = _expected(reference.prefix, documents[0])
    trainer = decode(bytes(read_verified(store, expected)), TrainerDocument, where=expected.key)
    tensors: list[TensorRecord] = []
    objects = [_expected(reference.prefix, item) for item in sorted(shards, key=lambda item: item.name)]
    with transfers(downloads) as run:
        records = arriving(begin_reads(run, store, objects, buffers), tensors)
        if group:
            deque(records, maxlen=0)  # part of a state has no digest
        elif state_sha256(in_name_order(records, trainer.records())) != manifest.state_sha256:
            raise IntegrityError(f"{reference.prefix}: tensors do not digest to the manifest's state_sha256")
    return LoadedCheckpoint(
        reference=reference, state_sha256=manifest.state_sha256, trainer=trainer, tensors=tuple(tensors)
    )


def _unless_committed(body: CheckpointCommitted, state: RunState) -> CheckpointCommitted | None:
    known = state.find_commit(body)
    return None if known is not None and known.committed.manifest_sha256 == body.manifest_sha256 else body


def _find_damage(store: ObjectStore, expected: ExpectedObject) -> ObjectDamaged | None:
    try:
        return find_damage(store, expected)
    except StoreUnavailable as error:
        return _unreadable(expected.key, expected.sha256, error)


def _unreadable(key: str, expected: str, error: StoreUnavailable) -> ObjectDamaged:
    return ObjectDamaged(key, expected=expected, found=f"{UNREADABLE}: {error}")


def _expected(prefix: str, item: ManifestObject) -> ExpectedObject:
    return ExpectedObject(key=f"{prefix}/{item.name}", bytes=item.bytes, sha256=item.sha256)


def _write_object(store: ObjectStore, prefix: str, name: str, chunks: Iterable[memoryview]) -> ManifestObject:
    written = write_pieces(store, f"{prefix}/{name}", chunks)
    return ManifestObject(name=name, bytes=written.bytes, sha256=written.sha256)


def _named_shards(
    groups: Iterable[TensorGroup], shard_bytes: int, writer: int, writers: int
) -> Iterator[tuple[str, list[TensorRecord]]]:
    for group in groups:
        if writers > 1 and not group.records:
            continue
        part = f"{group.name}-writer-{writer + 1}-of-{writers}" if writers > 1 else group.name
        shards = cut_shards(group.records, shard_bytes)
        for number, shard in enumerate(shards, start=1):
            yield f"{part}-{number:05d}-of-{len(shards):05d}.safetensors", shard
