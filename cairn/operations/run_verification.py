"""Verifies all that a run's log promises: entries, data, weights, checkpoints, aliases, folds; changes nothing."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from cairn.reports.errors import RunNotFound
from cairn.storage.checkpoints.checkpoint import verify_checkpoint
from cairn.storage.errors import IntegrityError, ObjectMissing
from cairn.storage.logs import log_entry, registry, run_entries, run_index, run_log, run_state
from cairn.storage.snapshots.data_snapshot import read_manifest
from cairn.storage.stores.object_store import ExpectedObject, ObjectStore, check_object, find_damage
from cairn.tasks.machine.placement import is_known_dead, shares_pids


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The number of things checked, and one line for each problem."""

    run_id: str
    entries: int
    checkpoints: int
    checkpoint_bytes: int
    data_snapshot: str | None
    problems: tuple[str, ...]


def verify_run(store: ObjectStore, run_id: str) -> Verification:
    """Re-hash everything the run has committed; raises `RunNotFound`."""
    log = log_entry.EntryLog(store=store, prefix=f"{run_log.run_prefix(run_id)}/log", kinds=run_entries.RUN_KINDS)
    listed = store.keys(log.prefix)
    if not listed and (needing := aliases_that_need(store, run_id)):
        aliases = ", ".join(needing)
        raise IntegrityError(f"{log.prefix}: is gone, and alias {aliases} points at the run; restore its entries")
    if not listed:
        raise RunNotFound(
            f"no run {run_id!r} in {store.url}; runs here: {', '.join(run_index.list_run_ids(store)) or 'none'}"
        )
    problems, entries, state = list[str](), list[log_entry.Entry](), run_state.RunState()
    try:
        for read in log.read_after(None):
            entries.append(read.entry)
    except IntegrityError as error:
        problems.append(str(error))
    else:
        problems += sequence_problems(listed, len(entries))
    for entry in entries:
        state = run_log.fold([entry], state)
        if entry.resume != state.resume:
            problems.append(f"seq {entry.seq}: its resume list is not what the entries up to it lead to")
    if not problems:
        problems += _cache_problems(store, run_id, state, len(entries))
    why = "its writer was fenced, or it contradicts what precedes it"
    problems += [f"seq {entry.seq}: a {entry.kind} without effect: {why}" for entry in state.refused]
    problems += registry_problems(store, run_id, state)
    problems += _data_problems(store, state)
    for record in state.readable:
        problems += map(str, verify_checkpoint(store, record.committed.reference))
    return Verification(
        run_id=run_id,
        entries=len(entries),
        checkpoints=len(state.readable),
        checkpoint_bytes=sum(record.committed.bytes for record in state.readable),
        data_snapshot=state.opened.data_snapshot if state.opened else None,
        problems=tuple(problems),
    )


def _cache_problems(store: ObjectStore, run_id: str, state: run_state.RunState, folded: int) -> Iterator[str]:
    log = run_log.RunLog(store, run_id)
    try:
        cached = log.refresh()
        if log.seq >= folded:  # the run is at work
            state = run_log.fold(log.read_entries()[folded : log.seq + 1], state)
    except IntegrityError as error:
        yield str(error)
        return
    if cached != state:
        yield f"{log.fold_key}: leads to another state than the entries do; delete it, it is only a cache"


def _data_problems(store: ObjectStore, state: run_state.RunState) -> Iterator[str]:
    """Yield the problems of the data snapshot and of the initial weights."""
    if state.opened is None:
        return
    folder = f"data/{state.opened.data_snapshot}"
    try:
        for item in read_manifest(store, state.opened.data_snapshot).objects:
            expected = ExpectedObject(key=f"{folder}/{item.key}", bytes=item.bytes, sha256=item.sha256)
            if (damage := find_damage(store, expected)) is not None:
                yield str(damage)
    except (ObjectMissing, IntegrityError) as error:
        yield str(error)
    if state.opened.initial_weights_sha256 is not None:
        from cairn.tasks.trainer.initial_weights import promised_weights  # few runs have any

        try:
            check_object(store, promised_weights(store, state.opened.initial_weights_sha256))
        except IntegrityError as error:
            yield str(error)


def registry_problems(store: ObjectStore, run_id: str, state: run_state.RunState) -> Iterator[str]:
    """Yield the problems of the aliases, and the entries missing by the run's pins."""
    aliases = registry.list_aliases(store)
    for alias in aliases:
        yield from _alias_problems(store, alias, run_id, state)
    for pin in state.pins:
        may_still_decide = shares_pids(pin.pinned_by) and not is_known_dead(pin.pinned_by)
        if pin.alias and pin.alias not in aliases and not may_still_decide:
            yield (
                f"models/{pin.alias}/log: is gone, or another host is just promoting: step {pin.step} of run {run_id} "
                "is pinned for this alias, and nothing is on record for it; restore it, or promote again"
            )


def sequence_problems(listed: list[str], read: int) -> Iterator[str]:
    """Yield the entries beyond a hole: a reader stops at the first absent number."""
    for key in listed:
        try:
            seq = log_entry.seq_of(key.rsplit("/", 1)[1])
        except IntegrityError as error:
            yield str(error)
            continue
        if seq >= read:
            yield f"{key}: is seq {seq}, but seq {read} is missing, so no reader gets to it"


def aliases_that_need(store: ObjectStore, run_id: str) -> list[str]:
    """Return the aliases that point at the run or could be rolled back to it, without those that cannot be read."""
    needing = []
    for alias in registry.list_aliases(store):
        with suppress(IntegrityError):
            if any(promoted.run_id == run_id for _, promoted in registry.Registry(store, alias).refresh().champions):
                needing.append(alias)
    return needing


def _alias_problems(store: ObjectStore, alias: str, run_id: str, state: run_state.RunState) -> Iterator[str]:
    log = log_entry.EntryLog(store=store, prefix=f"models/{alias}/log", kinds=registry.MODEL_KINDS)
    try:
        entries = [read.entry for read in log.read_after(None)]
        cached = registry.Registry(store, alias).refresh()
    except IntegrityError as error:
        yield str(error)
        return
    yield from sequence_problems(store.keys(log.prefix), len(entries))
    decided = registry.fold_decisions(entries)
    if cached != decided:
        yield f"models/{alias}/fold.json: leads to another state than the entries do; delete it, it is only a cache"
    known = {record.committed.manifest_sha256: record.state for record in state.checkpoints}
    for _, promoted in decided.champions:
        if promoted.run_id != run_id:
            continue
        state_now = known.get(promoted.manifest_sha256)
        named = f"models/{alias}/log: points at step {promoted.step} of run {run_id}, or could be rolled back to it"
        if state_now is None:
            yield f"{named}, but the run's log has no such commit: its end is gone or was replaced; restore its entries"
        elif state_now in (run_state.CheckpointState.SUPERSEDED, run_state.CheckpointState.DELETED):
            yield f"{named}, but that checkpoint is {state_now}; promote another one"
