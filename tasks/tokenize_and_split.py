"""The step `tokenize-and-split`: builds the data snapshot that a run trains on."""

from dataclasses import dataclass
from pathlib import Path

from prefect import task

from cairn.model.configuration.data import DataConfig
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.data import snapshot_lookup
from cairn.tasks.data.snapshot_build import ProgressListener, build_snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """The text of a run: relative paths of `data` start at `base_dir`; a killed build continues from `cache_dir`."""

    data: DataConfig
    base_dir: Path
    cache_dir: Path

    def __str__(self) -> str:
        return ""  # a run has one text: its step needs no other name


@task(name="tokenize-and-split", task_run_name="tokenize-and-split", persist_result=False)
def tokenize_and_split(
    text: Text, store: ObjectStore, on_progress: ProgressListener = lambda progress: None
) -> snapshot_lookup.SnapshotReference:
    """Return the text's data snapshot, building it unless the store has one of the same recipe.

    Raises InvalidCorpus for text or settings that cannot be used.
    """
    return build_snapshot(store, text.data, text.base_dir, cache_dir=text.cache_dir, on_progress=on_progress)
