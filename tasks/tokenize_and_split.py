"""The task `tokenize-and-split`: builds the data snapshot that a run trains on."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from cairn.model.configuration.data import DataConfig
from cairn.storage.stores.open_store import open_store
from cairn.tasks.data.snapshot_build import BuildOptions, ProgressListener, build_snapshot, ignore_progress
from cairn.tasks.data.snapshot_lookup import SnapshotReference


@task(name="tokenize-and-split", cache_policy=NO_CACHE, persist_result=False)
def tokenize_and_split(
    store_url: str,
    data: DataConfig,
    base_dir: Path,
    cache_dir: Path | None = None,
    on_progress: ProgressListener = ignore_progress,
) -> SnapshotReference:
    """Return the data snapshot of `data`, building it unless the store has one of the same recipe.

    A killed build continues from `cache_dir`. Raises InvalidCorpus for text or settings that cannot be used.
    """
    options = BuildOptions(on_progress=on_progress)
    return build_snapshot(open_store(store_url), data, base_dir, cache_dir=cache_dir, options=options)
