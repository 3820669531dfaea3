"""A sample that is bad though every hash is right: left out for ever, and the run equals one that began without it."""

from dataclasses import replace
from pathlib import Path

import pytest

from flows.configuration import load_configuration
from model.sample_order import SampleOrder
from model.token_windows import TokenWindows
from storage.document import encode, sha256
from storage.logs.entry_log import this_writer
from storage.logs.run_entries import DataQuarantined, RunOpened
from storage.logs.run_log import RunLog
from storage.snapshots.data_snapshot import open_snapshot, read_manifest
from storage.stores.local_store import LocalStore
from tasks.data.snapshot_build import build_snapshot
from tasks.practice_faults import flip_byte
from tests.crash.training_command import Command

pytestmark = pytest.mark.xdist_group("quarantine")  # its runs are made once for all its tests

STEP = 13


class SpoiledRun:
    """A run opened on a snapshot with one token outside the vocabulary, in the first sample of step 14."""

    def __init__(self, folder: Path, api_url: str) -> None:
        self.command = Command(folder, api_url)
        self.config = load_configuration(folder / "run.toml", overrides=(), environment={})
        self.store = LocalStore(folder / "store")
        self.window, self.snapshot_id = self._spoil(build_snapshot(self.store, self.config.data, folder).snapshot_id)
        self.log = RunLog(self.store, "bard")
        opened = RunOpened(
            run_id="bard",
            model_family=self.config.model_family,
            config=self.config.frozen(),
            config_sha256=self.config.frozen_sha256(),
            data_snapshot=self.snapshot_id,
            total_steps=self.config.training.steps,
            code_version="test",
        )
        self.log.append(lambda state: opened, writer=this_writer())

    def quarantine(self) -> None:
        """Leave the sample out from the beginning."""
        body = DataQuarantined(attempt=0, reason="bad-data", windows=(self.window,), detail="known before")
        self.log.append(lambda state: body, writer=this_writer())

    def _spoil(self, snapshot_id: str) -> tuple[int, str]:
        snapshot = open_snapshot(self.store, snapshot_id, Path("unused"))
        windows = TokenWindows(snapshot.train, self.config.model.block_size, snapshot.manifest.vocab_size)
        order = SampleOrder(
            window_count=windows.window_count,
            seed=self.config.training.seed,
            global_batch=self.config.training.global_batch,
        )
        drawn = order.windows_of(STEP)[:1]
        flip_byte(snapshot.train_files, windows.gather(drawn)[0].astype("uint16").tobytes())
        return int(drawn[0]), self._publish_as_it_is(snapshot_id)

    def _publish_as_it_is(self, snapshot_id: str) -> str:
        manifest = read_manifest(self.store, snapshot_id)
        found = {item.key: self.store.read(f"data/{snapshot_id}/{item.key}") for item in manifest.objects}
        objects = tuple(replace(item, sha256=sha256(found[item.key])) for item in manifest.objects)
        data = encode(replace(manifest, objects=objects))
        for key, content in found.items():
            self.store.write(f"data/{sha256(data)}/{key}", content)
        self.store.write(f"data/{sha256(data)}/snapshot.json", data)
        return sha256(data)


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> SpoiledRun:
    """The run that met the bad sample on its way."""
    run = SpoiledRun(tmp_path_factory.mktemp("spoiled"), api_url)
    run.command.train()
    return run


def test_exactly_the_guilty_sample_is_quarantined(spoiled: SpoiledRun) -> None:
    state = spoiled.command.state()
    assert [attempt.ended.reason for attempt in state.attempts if attempt.ended] == ["bad-data", "completed"]
    assert state.quarantined_windows == {spoiled.window}


def test_the_count_is_in_every_later_receipt(spoiled: SpoiledRun) -> None:
    starts = [attempt.started for attempt in spoiled.command.state().attempts]
    assert [started.quarantined_samples for started in starts] == [0, 1]
    assert starts[1].changed == "after bad-data: 1 sample(s) quarantined"


def test_the_run_ends_with_the_bits_of_one_that_began_with_that_quarantine(
    spoiled: SpoiledRun, tmp_path: Path, api_url: str
) -> None:
    other = SpoiledRun(tmp_path, api_url)
    assert other.snapshot_id == spoiled.snapshot_id
    other.quarantine()
    other.command.train()
    assert len(other.command.state().attempts) == 1
    assert other.command.state_sha256() == spoiled.command.state_sha256()
