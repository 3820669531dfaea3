"""A sample that is bad though every hash is right: left out for ever, and the run equals one that began without it."""

from pathlib import Path

import pytest

from cairn.storage.logs.log_entry import this_writer
from cairn.storage.logs.run_entries import DataQuarantined
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.configuration_source import load_configuration
from tests.crash.reference import reference_run
from tests.crash.spoiled_data import ARITHMETIC, open_run, spoil
from tests.crash.training_command import Command

pytestmark = pytest.mark.xdist_group("quarantine")  # its runs are made once for all its tests

STEP = 13


class SpoiledRun:
    """A run opened on a snapshot with one token outside the vocabulary, in the first sample of step 14."""

    def __init__(self, folder: Path, api_url: str) -> None:
        self.command = Command(folder, api_url)
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
