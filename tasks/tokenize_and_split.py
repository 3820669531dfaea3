"""The task `tokenize-and-split`: builds the data snapshot that a run trains on."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from cairn.model.configuration.data import DataConfig
from cairn.storage.stores.open_store import open_store
from cairn.tasks.data import snapshot_build, snapshot_lookup


@task(name="tokenize-and-split", cache_policy=NO_CACHE, persist_result=False)
def tokenize_and_split(
    store_url: str,
    data: DataConfig,
    base_dir: Path,
    cache_dir: Path | None = None,
    on_progress: snapshot_build.ProgressListener = snapshot_build.ignore_progress,
) -> snapshot_lookup.SnapshotReference:
    """Return the data snapshot of `data`, building it unless the store has one of the same recipe.

    A killed build continues from `cache_dir`. Raises InvalidCorpus for text or settings that cannot be used.
    """
    options = snapshot_build.BuildOptions(on_progress=on_progress)
    return snapshot_build.build_snapshot(open_store(store_url), data, base_dir, cache_dir=cache_dir, options=options)
