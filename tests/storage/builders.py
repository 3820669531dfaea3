"""A small run to test on: open, claim, stage, commit; and what must hold of it after any fault."""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from typing import Any

import msgspec

from cairn.storage.checkpoints.checkpoint import (
    CheckpointTarget,
    TensorGroup,
    UploadOptions,
    checkpoint_target,
    commit_checkpoint,
    stage_checkpoint,
)
from cairn.storage.checkpoints.checkpoint import verify_checkpoint as verify
from cairn.storage.checkpoints.payload import (
    MANIFEST_VERSION,
    Manifest,
    ManifestObject,
    TensorRecord,
    TrainerDocument,
    small_tensor,
)
from cairn.storage.logs.log_entry import FORMAT_VERSION, Entry, EntryLog, ReadEntry, encode_entry, entry_name, seq_of
from cairn.storage.logs.registry import Promoted
from cairn.storage.logs.run_entries import RUN_KINDS, AttemptEnded, CheckpointCommitted, RunOpened, StagedCheckpoint
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.codec import encode
from cairn.storage.stores.object_store import ObjectStore
from tests import entries
from tests.entries import NOON, ended, evaluated, started, writer
from tests.log_judge import judge_store
from tests.memory_store import MemoryStore

RUN = "r1"
LOG = f"runs/{RUN}/log"


def no_sleep(seconds: float) -> None:
    """Pass no time."""


def clock() -> datetime:
    """Stand still."""
    return NOON


def entry_log(store: ObjectStore, prefix: str = LOG, kinds: Mapping[str, type] = RUN_KINDS) -> EntryLog:
    return EntryLog(store=store, prefix=prefix, kinds=kinds, clock=clock, sleep=no_sleep)


def run_log(store: ObjectStore) -> RunLog:
    return RunLog(store, RUN, log=entry_log(store))


def opened() -> RunOpened:
    return entries.opened(RUN)


def committed(step: int, attempt: int) -> CheckpointCommitted:
    return CheckpointCommitted(
        step=step,
        attempt=attempt,
        prefix=checkpoint_target(RUN, step=step, attempt=attempt).prefix,
        manifest_sha256=f"{step:064x}",
        state_sha256="s",
        bytes=17,
        tokens=13,
        gpu_seconds=1.5,
    )


def bodies() -> list[object]:
    """One body of each kind that a run without accidents has."""
    return [opened(), started(1), committed(5, 1), evaluated(5, 1.5), ended(1)]


def promoted(step: int, **changes: Any) -> Promoted:
    """The promotion of a checkpoint of the run."""
    usual: dict[str, Any] = {"alias": "champion", "run_id": RUN, "prefix": f"p{step}", "manifest_sha256": f"m{step}"}
    usual |= {"suite_sha256": "s", "data_snapshot": "d", "metrics": {"val_loss": 1.5}, "by": "somebody"}
    return Promoted(step=step, **{**usual, "why": "better", "previous": None, **changes})


def entry(body: object, *, attempt: int | None = None, seq: int = 0) -> Entry:
    kinds = {record: kind for kind, record in RUN_KINDS.items()}
    return Entry(
        version=FORMAT_VERSION,
        seq=seq,
        kind=kinds[type(body)],
        at=NOON + timedelta(seconds=seq),
        write_id=f"{seq}",
        prev=None,
        writer=writer(attempt),
        resume=(),
        body=body,
    )


def forge(store: ObjectStore, body: object, *, attempt: int | None = None) -> None:
    """Append an entry as a writer without scruples would: chained correctly, checked by nobody."""
    last: ReadEntry | None = newest_entry(entry_log(store))
    forged = entry(body, attempt=attempt, seq=0 if last is None else last.entry.seq + 1)
    data = encode(replace(forged, prev=None if last is None else last.sha256))
    assert store.create(f"{LOG}/{entry_name(forged.seq)}", data)


def floats(name: str, *values: float) -> TensorRecord:
    data = struct.pack(f"<{len(values)}f", *values)
    return TensorRecord(name=name, dtype="F32", shape=(len(values),), data=memoryview(data))


def trainer_document(step: int) -> TrainerDocument:
    counter = TensorRecord(name="rng", dtype="I64", shape=(), data=memoryview(struct.pack("<q", step)))
    return TrainerDocument(
        version=1, step=step, cursor=step, learning_rate=0.5, versions={}, tensors=(small_tensor(counter),)
    )


def manifest_of(**changes: Any) -> Manifest:
    """The manifest of a checkpoint without shards."""
    trainer = ManifestObject(name="trainer.json", bytes=1, sha256="")
    usual: dict[str, Any] = {"run_id": RUN, "attempt": 1, "step": 5, "state_sha256": "s", "trainer": trainer}
    return Manifest(**{"version": MANIFEST_VERSION, "shards": (), **usual, **changes})


def open_run(store: ObjectStore) -> RunLog:
    log = run_log(store)
    log.append(lambda state: opened() if state.opened is None else None, writer=writer())
    return log


def claim(log: RunLog) -> int:
    """End the open attempt as lost and start the next; returns its number."""

    def end(state: RunState) -> AttemptEnded | None:
        return ended(state.latest_attempt) if state.open_attempt else None

    log.append(end, writer=writer())
    return log.append(lambda state: started(state.latest_attempt + 1), writer=writer()).latest_attempt


STAGED_NAMES = (
    "weights-00001-of-00002.safetensors",
    "weights-00002-of-00002.safetensors",
    "optimizer-00001-of-00001.safetensors",
    "trainer.json",
    "manifest.json",
)
"""The objects that `stage` writes."""


def stage(store: ObjectStore, *, step: int, attempt: int, shard_bytes: int = 16) -> StagedCheckpoint:
    """Stage two weight shards, one optimizer shard, a trainer document and the manifest."""
    weights = (floats("a", step, 1, 2), floats("b", attempt, 3, 4))
    return stage_checkpoint(
        store,
        target=checkpoint_target(RUN, step=step, attempt=attempt),
        groups=(
            TensorGroup(name="weights", records=weights),
            TensorGroup(name="optimizer", records=(floats("m", step),)),
        ),
        trainer=trainer_document(step),
        uploads=UploadOptions(shard_bytes=shard_bytes),
    )


def stage_records(store: ObjectStore, *records: TensorRecord, **uploads: int) -> StagedCheckpoint:
    """Stage these tensors as the weights of step 5."""
    return stage_checkpoint(
        store,
        target=CheckpointTarget(run_id=RUN, attempt=1, prefix=f"runs/{RUN}/checkpoints/p"),
        groups=(TensorGroup(name="weights", records=records),),
        trainer=trainer_document(5),
        uploads=UploadOptions(**uploads),
    )


def flip_bit(store: ObjectStore, key: str) -> None:
    """Turn over one bit in the middle of an object."""
    data = bytearray(store.read(key))
    data[len(data) // 2] ^= 1
    store.write(key, bytes(data))


def commit(log: RunLog, staged: StagedCheckpoint) -> RunState:
    return commit_checkpoint(log, staged, writer=writer(staged.attempt), tokens=13, gpu_seconds=1.5)


def run_with_commits(store: ObjectStore, *steps: int) -> RunLog:
    """Open a run, claim attempt 1 and commit a checkpoint at each of the steps."""
    log = open_run(store)
    attempt = claim(log)
    for step in steps:
        commit(log, stage(store, step=step, attempt=attempt))
    return log


def fail_to_load(log: RunLog) -> None:
    """Let an attempt resume from the newest checkpoint and end because it cannot be read."""
    state = log.refresh()
    if state.open_attempt is not None:
        log.append(lambda state: ended(state.latest_attempt), writer=writer())
    if (newest := state.newest_committed) is not None:
        reference, number = newest.committed.reference, state.latest_attempt + 1
        log.append(lambda state: started(number, resumed_from=reference), writer=writer())
        log.append(lambda state: ended(number, "storage", last_step=reference.step), writer=writer())


def laid_out(store: ObjectStore, *steps: int) -> RunLog:
    """Give the store such a run as copies of objects: for tests of what happens afterwards."""
    copy_objects(_made(steps), store)
    log = run_log(store)
    log.refresh()
    return log


@cache
def _made(steps: tuple[int, ...]) -> MemoryStore:
    made = MemoryStore("made")
    run_with_commits(made, *steps)
    return made


def ended_run(*steps: int) -> RunLog:
    """A run in memory with these commits, whose attempt has ended."""
    log = laid_out(MemoryStore("test"), *steps)
    log.append(lambda state: ended(1), writer=writer())
    return log


def copy_objects(source: MemoryStore, target: ObjectStore) -> None:
    """Write every object of one store to another."""
    for key, data in source._objects.items():
        target.write(key, data)


def _read_whole(store: ObjectStore) -> ObjectStore:
    """Return what is in the store, each object read once, in memory."""
    copy = MemoryStore("copy")
    for key in store.keys("runs"):
        copy.write(key, store.read(key))
    return copy


def check_invariants(store: ObjectStore, acknowledged: set[str]) -> RunState:
    """Read the run as a stranger would and check what ARCHITECTURE section 2 promises; returns the state."""
    store = _read_whole(store)
    keys = store.keys(LOG)
    assert keys == [f"{LOG}/{entry_name(seq)}" for seq in reversed(range(len(keys)))], "the sequence has a hole"
    raw: list[dict[str, Any]] = [msgspec.json.decode(store.read(key)) for key in reversed(keys)]
    digests = [hashlib.sha256(store.read(key)).hexdigest() for key in reversed(keys)]
    assert [item["prev"] for item in raw] == [None, *digests[:-1]], "the prev chain is broken"
    assert len({item["write_id"] for item in raw}) == len(raw), "one write_id under two sequence numbers"

    reader = run_log(store)
    state = reader.refresh()
    entries = reader.read_entries()
    assert len(entries) == len(keys)
    assert state.refused == ()
    assert [record.started.attempt for record in state.attempts] == list(range(1, len(state.attempts) + 1))
    assert entries[-1].resume == state.resume
    judge_store(store)
    assert acknowledged <= {record.committed.prefix for record in state.checkpoints}, "an acknowledged commit is lost"
    problems = [verify(store, record.committed.reference) for record in state.readable]
    assert problems == [()] * len(problems), "a committed checkpoint does not verify"
    return state


def append_as_a_newer_program(
    store: ObjectStore, *, log: str = LOG, kinds: Mapping[str, type] = RUN_KINDS, **changed: object
) -> None:
    """Append an entry that this program cannot understand."""
    last = newest_entry(entry_log(store, log, kinds))
    assert last is not None
    document = msgspec.json.decode(store.read(f"{log}/{entry_name(last.entry.seq)}"))
    document |= {"seq": last.entry.seq + 1, "prev": last.sha256, "write_id": "new", **changed}
    document |= {"body": {"anything": [1, {"deep": None}]}, "checksum": None}
    store.create(f"{log}/{entry_name(last.entry.seq + 1)}", encode_entry(document))


def newest_entry(log: EntryLog) -> ReadEntry | None:
    """Return the newest entry in two requests however long the log is, or None for an empty log."""
    key = log.store.first(log.prefix)
    return None if key is None else log.read(seq_of(key.rsplit("/", 1)[1]))
