"""A sample that is bad though every hash is right: left out for ever, and the run equals one that began without it."""

from pathlib import Path

import numpy as np
import pytest

from cairn.model.data.sample_order import SampleOrder
from cairn.storage.logs.log_entry import this_writer
from cairn.storage.logs.run_entries import DataQuarantined
from cairn.storage.logs.run_log import RunLog
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.configuration_source import load_configuration
from tests.crash.reference import reference_run
from tests.crash.spoiled_data import ARITHMETIC, open_run, spoil
from tests.crash.training_command import Command, configuration

pytestmark = pytest.mark.xdist_group("quarantine")  # its runs are made once for all its tests

STEP, STEPS = 13, 20


class SpoiledRun:
    """A run opened on a snapshot with one token outside the vocabulary, in the first sample of step 14."""

    def __init__(self, folder: Path, api_url: str) -> None:
        self.command = Command(folder, api_url)
        (folder / "run.toml").write_text(configuration(steps=STEPS), encoding="utf-8")
        config = load_configuration(folder / "run.toml", overrides=ARITHMETIC, environment={})
        store = LocalStore(folder / "store")
        spoiled = spoil(store, config, folder, step=STEP)
        self.window, self.snapshot_id = spoiled.window, spoiled.snapshot_id
        self.log = RunLog(store, "bard")
        open_run(self.log, config, self.snapshot_id)

    def quarantine(self) -> None:
        """Leave the sample out from the beginning."""
        body = DataQuarantined(attempt=0, reason="bad-data", windows=(self.window,), detail="known before")
        self.log.append(lambda state: body, writer=this_writer())


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> SpoiledRun:
    """The run that met the bad sample on its way."""
    run = SpoiledRun(tmp_path_factory.mktemp("spoiled"), api_url)
    run.command.train()
    return run


def test_exactly_the_guilty_sample_is_quarantined(spoiled: SpoiledRun) -> None:
    assert spoiled.command.reasons() == ["bad-data", "completed"]
    assert spoiled.command.state().quarantined_windows == {spoiled.window}


def test_the_count_is_in_every_later_receipt(spoiled: SpoiledRun) -> None:
    starts = [attempt.started for attempt in spoiled.command.state().attempts]
    assert [started.quarantined_samples for started in starts] == [0, 1]
    assert starts[1].changed == "after bad-data: 1 sample(s) quarantined"


def test_the_run_ends_with_the_bits_of_its_steps_trained_without_that_sample(spoiled: SpoiledRun) -> None:
    assert spoiled.command.state_sha256() == reference_run(spoiled.command).state_sha256


@pytest.mark.slow  # the quicker witness is the test above
def test_the_run_ends_with_the_bits_of_one_that_began_with_that_quarantine(
    spoiled: SpoiledRun, tmp_path: Path, api_url: str
) -> None:
    other = SpoiledRun(tmp_path, api_url)
    assert other.snapshot_id == spoiled.snapshot_id
    other.quarantine()
    other.command.train()
    assert len(other.command.state().attempts) == 1
    assert other.command.state_sha256() == spoiled.command.state_sha256()


def test_in_a_text_that_repeats_itself_only_the_drawn_window_is_spoiled(tmp_path: Path) -> None:
    text = "\n\n".join(f"{number}" + " over and over" * 1000 for number in range(20))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (tmp_path / "run.toml").write_text(configuration(), encoding="utf-8")
    source = f'data.sources=["{tmp_path}/text.txt"]'
    config = load_configuration(tmp_path / "run.toml", overrides=(source,), environment={})
    store = LocalStore(tmp_path / "store")
    spoiled = spoil(store, config, tmp_path, step=3)
    snapshot = open_snapshot(store, spoiled.snapshot_id, tmp_path / "cache")
    tokens = np.concatenate([shard.tokens() for shard in snapshot.train])
    outside = np.flatnonzero(tokens >= snapshot.manifest.vocab_size)
    order = SampleOrder(
        window_count=(len(tokens) - 1) // config.model.block_size,
        seed=config.training.seed,
        global_batch=config.training.global_batch,
        block_size=config.model.block_size,
    )
    assert spoiled.window == order.windows_of(3)[0]
    assert (outside // config.model.block_size).tolist() == [spoiled.window]
