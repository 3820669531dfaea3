"""A user without a name and a home, a home that nobody has, and a cache that cannot be made: a sentence, and an end."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from cairn.cli.command import code_of_error
from cairn.flows.orchestrator.prefect_settings import settle_prefect
from cairn.tasks.configuration.addresses import SUITES, find_file
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.placement import work_folder
from cairn.tasks.policy.termination import ExitCode
from tests.wiring.flow_in_process import FlowWorld

NOWHERE = "~no-such-user/a"
KEYS: Mapping[str, str] = {
    "data.sources": f'data.sources=["{NOWHERE}"]',
    "data.tokenizer": f"data.tokenizer={NOWHERE}.json",
    "training.init_from": f"training.init_from={NOWHERE}",
    "exporters.tensorboard": f"exporters.tensorboard={NOWHERE}",
    "exporters.wandb": f"exporters.wandb={NOWHERE}",
    "store": f"store={NOWHERE}",
}


@pytest.mark.parametrize("key", KEYS)
def test_a_home_that_nobody_has_is_refused_with_the_key_that_names_it(flow: FlowWorld, key: str) -> None:
    with pytest.raises(Exception, match="no home folder is known for '~no-such-user'; write the whole path") as refused:
        flow.check(KEYS[key])
    assert code_of_error(refused.value) == ExitCode.USAGE
    assert key in str(refused.value)


def test_a_store_on_the_command_line_is_no_exception(flow: FlowWorld) -> None:
    with pytest.raises(Exception, match="store ~no-such-user/a: no home folder is known") as refused:
        flow.train(store=NOWHERE)
    assert code_of_error(refused.value) == ExitCode.USAGE


def test_nor_is_a_file_of_a_suite() -> None:
    with pytest.raises(InvalidConfiguration, match=r"~no-such-user.*write the whole path"):
        find_file(f"{NOWHERE}.toml", SUITES, folder=Path())


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose user id is in no list of users."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.chdir(tmp_path)
    return {"TMPDIR": str(tmp_path)}


def test_a_user_without_a_home_has_a_work_folder_among_the_temporary_ones(homeless: dict[str, str]) -> None:
    assert work_folder(homeless).name == f"cairn-{os.getuid()}"


def test_no_folder_is_made_that_is_called_as_a_home_is_written(homeless: dict[str, str], tmp_path: Path) -> None:
    work_folder(homeless)
    assert not (tmp_path / "~").exists()


def test_prefect_is_settled_for_a_user_without_a_home(homeless: dict[str, str], tmp_path: Path) -> None:
    homeless["CAIRN_CACHE"] = str(tmp_path / "cache")
    settle_prefect(homeless, say=lambda line: pytest.fail(line))
    assert homeless["PREFECT_HOME"].startswith(str(tmp_path / "cache"))


@pytest.mark.parametrize("place", ["/proc/nowhere", "{file}", "{file}/below"])
def test_a_cache_that_cannot_be_made_is_refused_by_name(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    chosen = place.format(file=tmp_path / "file")
    with pytest.raises(InvalidConfiguration, match=f"CAIRN_CACHE={chosen}: .*set it to a folder of your own"):
        work_folder({"CAIRN_CACHE": chosen})
