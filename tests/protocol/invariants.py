"""What must hold of a store after any fault and any schedule, asked by somebody who has never seen it before.

Owns the final examination and the liveness that follows: a fresh attempt claims, resumes and commits. The rules for
single entries and single deletions are in `raw_history`.
"""

from dataclasses import replace
from typing import Any

from cairn.storage.checkpoints.checkpoint import checkpoint_target
from cairn.storage.errors import StorageError
from cairn.storage.logs.registry import Registry
from cairn.storage.logs.run_log import RunLog, fold
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.errors import LiveOwner, TaskError
from tests.protocol.processes import PREFIX, Process, claim_and_load, commit, delete, end_attempt, stage, sweep
from tests.protocol.raw_history import (
    BROKEN,
    GONE,
    READABLE,
    RawRun,
    Violation,
    find_damage,
    mirrored,
    reached,
    read_raw,
    require,
    tell_aliases,
    tell_others,
    tell_run,
)
from tests.protocol.world import Ledger, WatchedStore, bring_missing
from tests.storage.builders import RUN, run_log


def examine(store: WatchedStore, ledger: Ledger) -> RawRun:
    """Check every invariant on what is left; raises `Violation` naming the first that does not hold."""
    bring_missing(store.inner, ledger)
    left = mirrored(store.inner)
    told = tell_run(left, PREFIX)
    _require_readers_agree(left, told)
    _require_acknowledged(left, told, ledger)
    _require_bytes(left, told, ledger)
    for run, other in tell_others(left, f"{PREFIX}/"):
        _require_fork(left, told, run, other, ledger)
    return told


def _require_fork(store: ObjectStore, parent: RawRun, run: str, told: RawRun, ledger: Ledger) -> None:
    """What the product reads of a fork is what its entries say, and what it needs of its parent is there."""
    log = RunLog(store, run.split("/")[1])
    state = fold(log.read_entries())
    require(log.refresh() == state and state.refused == (), "readers agree", run)
    require([item.committed.prefix for item in state.readable] == told.readable, "readers agree", run)
    needed = told.needed_beginning
    if needed is not None and needed not in ledger.broken:
        damage = find_damage(store, parent.commits[needed])
        require(damage is None and parent.status[needed] == READABLE, "a fork keeps its beginning", damage)
    for prefix in told.readable:
        damage = None if prefix in ledger.broken else find_damage(store, told.commits[prefix])
        require(damage is None, "committed verifies", damage)


def continue_run(store: WatchedStore, ledger: Ledger, *, seen_as: object | None = None) -> None:
    """A fresh process takes the run over, resumes, commits and ends; then everything is examined again."""
    process = Process(store=seen_as or store, ledger=ledger, host="afterwards", shard_bytes=1024)
    log = process.log()
    try:
        if log.refresh().opened is None or tell_run(mirrored(store.inner), PREFIX).closed:
            return
        if log.state.deleted is not None:
            return _finish_deletion(process, store, ledger)
        attempt, step = _claim_and_load(process, log)
        step += 1
        commit(process, log, stage(process, step=step, attempt=attempt))
        end_attempt(process, log, attempt)
    except (StorageError, TaskError) as error:
        if tell_run(mirrored(store.inner), PREFIX).deleted:  # a late request has arrived
            return _finish_deletion(process, store, ledger)
        require(False, "the run goes on", f"{type(error).__name__}: {error}")
    told = examine(store, ledger)
    _continue_fork(replace(process, run="twin"))
    examine(store, ledger)
    mine = checkpoint_target(RUN, step=step, attempt=attempt).prefix
    require(told.readable[0] == mine, "the run goes on", f"newest is {told.readable[0]}, not {mine}")


def _continue_fork(process: Process) -> None:
    """Where there is a fork, it goes on: with its own newest checkpoint or its beginning, even after a sweep."""
    told = dict(tell_others(mirrored(process.store.inner), f"{PREFIX}/")).get(process.prefix)
    if told is None or not told.opened or told.deleted:
        return
    sweep(replace(process, run=RUN))
    log = process.log()
    try:
        attempt, step = _claim_and_load(process, log)
        commit(process, log, stage(process, step=step + 1, attempt=attempt))
        end_attempt(process, log, attempt)
    except (StorageError, TaskError) as error:
        spoiled = process.ledger.broken & {*told.status, told.beginning}
        require(spoiled, "a fork goes on", f"{type(error).__name__}: {error}")


def _finish_deletion(process: Process, store: WatchedStore, ledger: Ledger) -> None:
    """Whoever deletes the run again leaves nothing of its checkpoints."""
    delete(process)
    told = examine(store, ledger)
    require(set(told.status.values()) <= {GONE}, "a deletion comes to its end", told.status)
    left = store.inner.keys(f"{PREFIX}/checkpoints")
    require(not left and not store.unfinished(PREFIX), "a deletion comes to its end", left)


def _claim_and_load(process: Process, log: RunLog) -> tuple[int, int]:
    """Claim the run, and once more where a late request has made its dead sender look alive."""
    try:
        return claim_and_load(process, log)
    except LiveOwner:
        return claim_and_load(process, log)


def _require_readers_agree(store: ObjectStore, told: RawRun) -> None:
    """The product's reader, with and without its cache, sees what the raw entries say."""
    log = run_log(store)
    try:
        entries, cached = log.read_entries(), log.refresh()
    except StorageError as error:
        raise Violation(f"readers agree: {type(error).__name__}: {error}") from error
    state = fold(entries)
    require(cached == state, "the cache agrees with the entries", f"{cached} is not {state}")
    require(state.refused == (), "no entry is refused", state.refused)
    readable = [record.committed.prefix for record in state.readable]
    require(readable == told.readable, "nothing uncommitted is visible", f"{readable} is not {told.readable}")
    states = {record.committed.prefix: record.state for record in state.checkpoints}
    require(states == told.status, "readers agree", f"{states} is not {told.status}")
    pins = {pin.pin_id for pin in state.pins}
    require(pins == told.pins.keys(), "readers agree", f"pins {pins} are not {told.pins.keys()}")
    for folder, stack in tell_aliases(store).items():
        champion = Registry(store, folder.split("/")[1]).refresh().champion
        last = stack[-1]["manifest_sha256"] if stack else None
        require((champion.manifest_sha256 if champion else None) == last, "readers agree", folder)


def _require_acknowledged(store: ObjectStore, told: RawRun, ledger: Ledger) -> None:
    raw: dict[str, list[dict[str, Any]]] = {}
    for name, write_id in ledger.entries.items():
        log, seq = name.split(" ")
        entries = raw.setdefault(log, read_raw(store, log))
        kept = int(seq) < len(entries) and entries[int(seq)]["write_id"] == write_id
        require(kept, "nothing acknowledged is lost", name)
    commits = dict(told.commits)
    for _, other in tell_others(store, f"{PREFIX}/"):
        commits |= other.commits
    lost = ledger.committed.keys() - commits.keys()
    require(not lost, "nothing acknowledged is lost", lost)
    for prefix, digest in ledger.committed.items():
        require(commits[prefix]["state_sha256"] == digest, "content", prefix)


def _require_bytes(store: ObjectStore, told: RawRun, ledger: Ledger) -> None:
    for prefix, status in told.status.items():
        if status == READABLE and prefix not in ledger.broken:
            damage = find_damage(store, told.commits[prefix])
            require(damage is None, "committed verifies", damage)
        if status == BROKEN:
            require(
                prefix in ledger.broken | ledger.condemned | told.unreadable,
                "no quarantine on one read",
                f"{prefix} is quarantined and sound",
            )
        if status == GONE:
            require(store.keys(prefix) == [], "deleted is deleted", prefix)
    for promoted in reached(store):
        if not promoted["prefix"].startswith(f"{PREFIX}/"):
            continue
        status = told.status[promoted["prefix"]]
        require(status == READABLE, "nothing needed is superseded", f"{promoted['prefix']} is a champion and {status}")
