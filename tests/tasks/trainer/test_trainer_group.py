"""How many processes there are, where that is said, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.model.configuration.data import DataConfig
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.storage.stores.child_process import child_command
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import TaskError
from cairn.tasks.trainer.launched_ranks import find_failed_rank
from cairn.tasks.trainer.trainer_group import TrainerGroup, trainer_group
from cairn.tasks.trainer.trainer_protocol import RankEnded

SECRET = {"CAIRN_RENDEZVOUS_SECRET": "0123456789abcdef"}


def training(**values: Any) -> TrainingConfig:
    return TrainingConfig(steps=10, global_batch=8, **values)


def processes(tmp_path: Path, device: str = "auto", **environment: str) -> int:
    return trainer_group(training(processes="auto", device=device), environment, devices=tmp_path).processes


def test_one_process_is_the_trainer_itself_and_more_are_started_by_the_launcher() -> None:
    assert TrainerGroup().command() == child_command("cairn.tasks.trainer.trainer")
    *launcher, group = TrainerGroup(processes=4).command()
    assert tuple(launcher) == child_command("cairn.tasks.trainer.trainer_group")
    assert msgspec.json.decode(group, type=TrainerGroup) == TrainerGroup(processes=4)
    several = TrainerGroup(processes=4, nodes=2, node_rank=1, rendezvous="node-0:29500")
    assert msgspec.json.decode(several.command()[-1], type=TrainerGroup) == several
    first = msgspec.json.decode(replace(several, node_rank=0).command()[-1], type=TrainerGroup)
    assert (first.rendezvous, several.size) == ("node-0:0", 8)


def test_auto_is_one_process_for_each_gpu_and_one_without(tmp_path: Path) -> None:
    assert processes(tmp_path) == 1
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert processes(tmp_path) == 2
    assert processes(tmp_path, CUDA_VISIBLE_DEVICES="1") == 1
    assert processes(tmp_path, CUDA_VISIBLE_DEVICES="0,1,2,-1,3") == 3
    assert processes(tmp_path, CUDA_VISIBLE_DEVICES="") == 1
    assert processes(tmp_path, device="cpu") == processes(tmp_path, device="cuda:1") == 1


def test_a_scheduler_says_by_the_environment_how_many_machines_there_are() -> None:
    said = {"CAIRN_NODES": "2", "CAIRN_NODE_RANK": "1", "CAIRN_RENDEZVOUS": "node-0:29500", **SECRET}
    group = trainer_group(training(processes=2), said)
    assert (group.nodes, group.node_rank, group.rendezvous, group.size) == (2, 1, "node-0:29500", 4)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"CAIRN_NODES": "2"}, "rendezvous"),
        ({"CAIRN_NODES": "two"}, "CAIRN_NODES"),
        ({"CAIRN_NODES": "2", "CAIRN_NODE_RANK": "2", "CAIRN_RENDEZVOUS": "a:1"}, "node_rank"),
        ({"CAIRN_NODES": "2", "CAIRN_RENDEZVOUS": "a:1"}, "CAIRN_RENDEZVOUS_SECRET: 0 characters"),
        ({"CAIRN_NODES": "2", "CAIRN_RENDEZVOUS": "a:1", "CAIRN_RENDEZVOUS_SECRET": "short"}, "at least 16"),
        ({"CAIRN_NODES": "5", "CAIRN_RENDEZVOUS": "a:1", **SECRET}, "training.global_batch = 8"),
    ],
)
def test_what_nobody_can_meet_with_is_refused_by_name(environment: dict[str, str], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        trainer_group(training(processes=2), environment)


def test_apples_gpu_is_one_and_takes_one_process() -> None:
    assert trainer_group(training(device="mps"), {}).size == 1
    with pytest.raises(TaskError, match=r"rule: one with training\.device = 'mps'"):
        trainer_group(training(device="mps", processes=2), {})


def test_the_number_of_processes_does_not_change_which_run_it_is() -> None:
    one, several = (
        RunConfig(model_family="tiny", data=DataConfig(sources=("a.txt",)), model=ModelConfig(), training=chosen)
        for chosen in (training(), training(processes=2, parallel="fsdp"))
    )
    assert one.frozen() == several.frozen()


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ({0: 77, 1: -9}, (1, -9)),
        ({1: 1}, (1, 1)),
        ({0: 77}, (0, 77)),
        ({2: -11, 1: -6}, (2, -11)),
        ({0: 0, 1: 1}, (1, 1)),
    ],
)
def test_the_rank_that_ended_first_is_the_reason_not_those_that_fell_with_it(
    codes: dict[int, int], first: tuple[int, int]
) -> None:
    ended = find_failed_rank([RankEnded(rank=rank, exit_code=code) for rank, code in codes.items()])
    assert ended is not None and (ended.rank, ended.exit_code) == first


def test_ranks_that_all_end_well_are_nobodys_fault() -> None:
    assert find_failed_rank([RankEnded(rank=0, exit_code=0), RankEnded(rank=1, exit_code=0)]) is None
