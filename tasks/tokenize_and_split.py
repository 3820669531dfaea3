"""The task ``tokenize-and-split``: the orchestrator's thin skin over ``snapshot_build``.

Owns the task's name and its arguments. Refuses to know how a snapshot is made.
"""

from pathlib import Path

from prefect import task

from model.configuration import DataConfig
from storage.open_store import open_store
from tasks.snapshot_build import SnapshotReference, build_snapshot


@task(name="tokenize-and-split", persist_result=False)
def tokenize_and_split(store_url: str, data: DataConfig, base_dir: Path) -> SnapshotReference:
    """Return the data snapshot of ``data`` in the store, building it unless its recipe is known.

    Relative paths start at ``base_dir``. Raises InvalidCorpus for text or settings that cannot be used.
    """
    return build_snapshot(open_store(store_url), data, base_dir)
