from pathlib import Path

from cairn.model.configuration.data import DataConfig
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.storage.stores.open_store import open_store
from cairn.tasks.tokenize_and_split import Text, tokenize_and_split


def test_the_step_publishes_a_snapshot_that_opens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph {number}" for number in range(50)))
    text = Text(data=DataConfig(sources=("a.txt",), tokenizer="bytes"), base_dir=tmp_path, cache_dir=tmp_path / "cache")
    store = open_store(str(tmp_path / "store"))
    reference = tokenize_and_split.fn(text, store)
    assert open_snapshot(store, reference.snapshot_id, tmp_path).train


def test_the_task_bears_the_name_people_look_for() -> None:
    assert tokenize_and_split.name == "tokenize-and-split"
