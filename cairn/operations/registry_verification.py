"""Verifies every alias of a store: its log and cached fold, and that one run has the checkpoints that it needs."""

from collections.abc import Iterator

from storage.errors import IntegrityError
from storage.logs.entry_log import EntryLog
from storage.logs.log_entry import seq_of
from storage.logs.registry import MODEL_KINDS, Registry, fold_decisions, list_aliases
from storage.logs.run_state import CheckpointState, RunState
from storage.stores.object_store import ObjectStore
from tasks.machine.placement import is_known_dead, shares_pids


def registry_problems(store: ObjectStore, run_id: str, state: RunState) -> Iterator[str]:
    """Yield what is wrong with the aliases, and what they and the run's pins say to be missing."""
    aliases = list_aliases(store)
    for alias in aliases:
        yield from _alias_problems(store, alias, run_id, state)
    for pin in state.pins:
        may_still_decide = shares_pids(pin.holder) and not is_known_dead(pin.holder)
        if pin.alias and pin.alias not in aliases and not may_still_decide:
            yield (
                f"models/{pin.alias}/log: is gone, or another host is just promoting: step {pin.step} of run {run_id} "
                "is pinned for this alias, and nothing is on record for it; restore it, or promote again"
            )


def sequence_problems(listed: list[str], read: int) -> Iterator[str]:
    """Yield the entries beyond a hole: a reader stops at the first absent number."""
    for key in listed:
        try:
            seq = seq_of(key.rsplit("/", 1)[1])
        except IntegrityError as error:
            yield str(error)
            continue
        if seq >= read:
            yield f"{key}: is seq {seq}, but seq {read} is missing, so nobody reads it"


def aliases_that_need(store: ObjectStore, run_id: str) -> list[str]:
    """Return the aliases that point at the run or could be rolled back to it, without those that cannot be read."""
    needing = []
    for alias in list_aliases(store):
        try:
            champions = Registry(store, alias).refresh().champions
        except IntegrityError:
            continue
        if any(promoted.run_id == run_id for _, promoted in champions):
            needing.append(alias)
    return needing


def _alias_problems(store: ObjectStore, alias: str, run_id: str, state: RunState) -> Iterator[str]:
    log = EntryLog(store=store, prefix=f"models/{alias}/log", kinds=MODEL_KINDS)
    try:
        entries = [read.entry for read in log.read_after(None)]
        cached = Registry(store, alias).refresh()
    except IntegrityError as error:
        yield str(error)
        return
    yield from sequence_problems(store.keys(log.prefix), len(entries))
    decided = fold_decisions(entries)
    if cached != decided:
        yield f"models/{alias}/fold.json: leads to another state than the entries do; delete it, it is only a cache"
    known = {record.committed.manifest_sha256: record.state for record in state.checkpoints}
    for _, promoted in decided.champions:
        if promoted.run_id != run_id:
            continue
        standing = known.get(promoted.manifest_sha256)
        named = f"models/{alias}/log: points at step {promoted.step} of run {run_id}, or could be rolled back to it"
        if standing is None:
            yield f"{named}, but the run's log has no such commit: its end is gone or was replaced; restore its entries"
        elif standing in (CheckpointState.SUPERSEDED, CheckpointState.DELETED):
            yield f"{named}, but that checkpoint is {standing}; promote another one"
