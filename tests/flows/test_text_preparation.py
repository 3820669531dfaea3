"""What is prepared while Prefect is imported is what the run would make; nothing that fails or takes long delays it."""

from pathlib import Path

import pytest

from cairn.flows.preparation import preflight
from cairn.flows.preparation.training_request import ResolvedRequest, TrainingRequest, resolve_request
from cairn.model.estimates.numerics import MachineSpeed
from cairn.storage.snapshots.data_snapshot import list_snapshots
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.snapshot_build import build_snapshot
from tests.cairn.command_folder import CONFIGURATION, TEXT


@pytest.fixture
def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResolvedRequest:
    (tmp_path / "run.toml").write_text(CONFIGURATION)
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    request = TrainingRequest(config=str(tmp_path / "run.toml"), store=str(tmp_path / "store"))
    return resolve_request(request, {})


def snapshots_after(resolved: ResolvedRequest, folder: Path) -> list[str]:
    assert resolved.configuration is not None

    def ask() -> MachineSpeed | None:
        raise AssertionError("these numerics need no measurement")

    with preflight.preparing_text(resolved, resolved.configuration, resolved.open_log(), ask):
        pass
    return list(list_snapshots(LocalStore(folder / "store")))


def test_the_snapshot_of_a_small_text_is_built_as_the_run_builds_it(
    resolved: ResolvedRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_SMALL_BYTES", len(TEXT.encode()))
    (prepared,) = snapshots_after(resolved, tmp_path)
    assert resolved.configuration is not None
    built = build_snapshot(LocalStore(tmp_path / "elsewhere"), resolved.configuration.data, tmp_path)
    assert built.snapshot_id == prepared


def test_much_text_is_left_to_the_run(
    resolved: ResolvedRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_SMALL_BYTES", len(TEXT.encode()) - 1)
    assert snapshots_after(resolved, tmp_path) == []


def test_a_text_that_is_gone_is_left_to_the_run(resolved: ResolvedRequest, tmp_path: Path) -> None:
    (tmp_path / "text.txt").unlink()
    assert snapshots_after(resolved, tmp_path) == []
