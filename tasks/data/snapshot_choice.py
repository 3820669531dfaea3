"""The snapshot that a source ``snapshot:<id>`` means: one that is in the store already, imported or built before.

Owns the look-up and its refusals. A beginning of an id is looked up once, when a run is opened; the run keeps the whole
id, which no later snapshot can make ambiguous. Refuses to build.
"""

from model.configuration.data import SNAPSHOT_SOURCE
from storage.errors import ObjectMissing
from storage.snapshots.data_snapshot import read_manifest, snapshot_ids
from storage.stores.object_store import ObjectStore
from tasks.data.document import InvalidCorpus
from tasks.data.snapshot_recipe import SnapshotReference

_LISTED = 20


def chosen_snapshot(store: ObjectStore, beginning: str) -> SnapshotReference:
    """Return the one snapshot whose id begins so; raises InvalidCorpus where there is none, or more than one."""
    there = snapshot_ids(store)
    found = [snapshot_id for snapshot_id in there if snapshot_id.startswith(beginning)]
    if len(found) > 1:
        raise _refusal(beginning, f"{len(found)} snapshots begin so: {', '.join(found)}", "name one of them wholly")
    if not found:
        listed = ", ".join(snapshot_id[:12] for snapshot_id in there[:_LISTED]) or "none"
        rule = "it is in the store. Bring it there with `cairn import-tokens`, or name one that is: " + listed
        raise _refusal(beginning, f"no such snapshot in {store.url}", rule)
    try:
        return SnapshotReference(snapshot_id=found[0], manifest=read_manifest(store, found[0]), reused=True)
    except ObjectMissing as missing:
        raise _refusal(beginning, f"only a part of it is in {store.url}", "make it once more, to its end") from missing


def _refusal(beginning: str, problem: str, rule: str) -> InvalidCorpus:
    return InvalidCorpus(f"data.sources = '{SNAPSHOT_SOURCE}{beginning}': {problem}; rule: {rule}")
