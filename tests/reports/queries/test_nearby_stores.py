"""Where a store without runs is, and the stores near it, by their layout and with a bounded look."""

import os
from pathlib import Path

import pytest

from cairn.reports.errors import RunNotFound
from cairn.reports.queries import run_lookup
from cairn.reports.queries.run_lookup import describe_no_runs, find_run
from cairn.storage.stores.local_store import LocalStore
from tests.memory_store import MemoryStore


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, below two that are this test's own."""
    folder = tmp_path / "up" / "here"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def make_store(folder: Path, *runs: str) -> None:
    for run in runs:
        (folder / "runs" / run / "log").mkdir(parents=True)


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("up/here/cairn-stores", "--store cairn-stores (1 run)"),
        ("up/here/other/cairn-store", "--store other/cairn-store (1 run)"),
        ("up/cairn-store", "--store ../cairn-store (1 run)"),
        ("cairn-store", "--store ../../cairn-store (1 run)"),
        ("up/here/my store", "--store 'my store' (1 run)"),
        ("up", "--store .. (1 run)"),
    ],
)
def test_a_store_nearby_is_named_as_it_is_typed(here: Path, tmp_path: Path, place: str, shown: str) -> None:
    make_store(tmp_path / place, "bard")
    assert shown in describe_no_runs(LocalStore(Path("cairn-store")))


def test_a_store_beside_the_mistyped_one_is_named(here: Path, tmp_path: Path) -> None:
    make_store(tmp_path / "far" / "away" / "cairn-store", "bard", "wide")
    told = describe_no_runs(LocalStore(tmp_path / "far" / "away" / "cairn-stoer"))
    assert "--store ../../far/away/cairn-store (2 runs)" in told


def test_a_folder_that_does_not_exist_is_said_not_to_and_one_that_does_is_not(here: Path) -> None:
    (here / "there").mkdir()
    assert f"no runs in {here}/gone, a folder that does not exist; " in describe_no_runs(LocalStore(Path("gone")))
    assert f"no runs in {here}/there; " in describe_no_runs(LocalStore(Path("there")))


def test_no_store_nearby_is_no_guess(here: Path) -> None:
    (here / "code" / "runs").mkdir(parents=True)  # of another tool
    assert "stores nearby" not in describe_no_runs(LocalStore(Path("gone")))


def test_a_store_without_a_folder_is_named_by_its_url() -> None:
    assert describe_no_runs(MemoryStore()) == f"there are no runs in {MemoryStore().url}"


def test_folders_full_of_folders_cost_a_bounded_look(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        (here / str(number) / "deep").mkdir(parents=True)
    listed = list[str]()
    monkeypatch.setattr(run_lookup, "_MOST_ENTRIES", 3)
    monkeypatch.setattr(run_lookup, "glob", lambda pattern: listed.append(pattern) or [])
    describe_no_runs(LocalStore(Path("gone")))
    assert len(listed) <= 4 * (1 + 3 + 9)


@pytest.mark.skipif(os.geteuid() == 0, reason="this user may read everything")
def test_a_folder_that_may_not_be_read_is_passed_over(here: Path) -> None:
    (here / "secret").mkdir(mode=0o000)
    assert "there are no runs" in describe_no_runs(LocalStore(Path("gone")))


def test_a_run_that_is_not_there_names_the_store_nearby(here: Path) -> None:
    make_store(here / "other", "bard")
    with pytest.raises(RunNotFound, match=r"no run 'bard': there are no runs in .*gone.*--store other \(1 run\)"):
        find_run(LocalStore(Path("gone")), "bard")
