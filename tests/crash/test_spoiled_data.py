from pathlib import Path

import numpy as np

from cairn.model.data.sample_order import SampleOrder
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.configuration_source import load_configuration
from tests.crash.spoiled_data import spoil
from tests.crash.training_command import configuration

STEP = 3


def test_in_a_text_that_repeats_itself_only_the_drawn_window_is_spoiled(tmp_path: Path) -> None:
    text = "\n\n".join(f"{number}" + " over and over" * 1000 for number in range(20))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (tmp_path / "run.toml").write_text(configuration(), encoding="utf-8")
    source = f'data.sources=["{tmp_path}/text.txt"]'
    config = load_configuration(tmp_path / "run.toml", overrides=(source,), environment={})
    store = LocalStore(tmp_path / "store")
    spoiled = spoil(store, config, tmp_path, step=STEP)
    snapshot = open_snapshot(store, spoiled.snapshot_id, tmp_path / "cache")
    tokens = np.concatenate([shard.tokens() for shard in snapshot.train])
    outside = np.flatnonzero(tokens >= snapshot.manifest.vocab_size)
    order = SampleOrder(
        window_count=(len(tokens) - 1) // config.model.block_size,
        seed=config.training.seed,
        global_batch=config.training.global_batch,
        block_size=config.model.block_size,
    )
    assert spoiled.window == order.windows_of(STEP)[0]
    assert (outside // config.model.block_size).tolist() == [spoiled.window]
