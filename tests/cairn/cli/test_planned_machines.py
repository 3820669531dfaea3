"""`cairn train --dry-run` for machines that are not there: what it says of 512 processes, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.estimates.size_estimate import step_exchanges
from cairn.storage.checkpoints.checkpoint import read_manifest
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from tests.commands import Cairn, Ended

CONFIG = """
[data]
sources = ["text.txt"]
tokenizer = "bytes"
[model]
n_layer = 4
n_head = 4
n_embd = 256
block_size = 64
[training]
steps = 50
global_batch = 512
micro_batch = 1
"""
SOME = ("--gpu-memory", "80", "--set", "training.processes=8")
GPUS = ("--machines", "64", *SOME)
FP32 = ("--set", "training.precision=fp32")
Plan = Callable[..., Ended]
SHARDED = ("--set", "training.parallel=fsdp")


@pytest.fixture
def plan(cairn: Cairn, tmp_path: Path) -> Plan:
    (tmp_path / "text.txt").write_text("\n\n".join(f"line {number} of a text" for number in range(100)))
    (tmp_path / "run.toml").write_text(CONFIG)
    return lambda *words: cairn("train", "run.toml", "--dry-run", *words)


def planned(plan: Plan, *words: str) -> dict[str, Any]:
    ended = plan(*words, "--json")
    assert ended.code == 0, ended.err
    document: dict[str, Any] = json.loads(ended.out)
    return document


def exchanges(document: dict[str, Any]) -> list[dict[str, Any]]:
    config = document["config"]
    model, training = ModelConfig(**config["model"]), TrainingConfig(**config["training"])
    vocabulary, sizes = document["data"]["vocab_size"], {"micro_batch": document["memory"]["sizes"]["micro_batch"]}
    found = step_exchanges(model, training, vocabulary, **sizes, processes=document["processes"])
    return [{"operation": one.operation, "calls": one.calls, "bytes": one.bytes} for one in found]


@pytest.mark.parametrize(
    "words",
    [
        (*GPUS, "--set", "training.parallel=ddp"),
        (*GPUS, "--set", "training.parallel=fsdp"),
        (*FP32, "--set", "training.processes=512", "--set", "training.memory_check=false"),
    ],
    ids=["machines that are not there, ddp", "fsdp", "one machine"],
)
def test_processes_on_machines_that_are_not_there_are_planned_for(plan: Plan, words: tuple[str, ...]) -> None:
    document = planned(plan, *words)
    assert document["processes"] == 512 and document["exchanges"] == exchanges(document) != []


def test_a_gpu_that_is_not_there_gets_its_numerics_its_memory_and_the_bound_of_the_estimate(plan: Plan) -> None:
    document = planned(plan, *GPUS, *SHARDED)
    assert (document["config"]["training"]["precision"], document["config"]["training"]["kernels"]) == ("bf16", "fused")
    memory = document["memory"]
    assert (memory["there_bytes"], memory["error_bound"], memory["workers"]) == (80_000_000_000, 0.03, 1)


def test_more_processes_that_share_the_network_need_less_memory_each(plan: Plan) -> None:
    few, many = (planned(plan, *SOME, *SHARDED, "--machines", count)["memory"]["parts"] for count in ("2", "64"))
    assert few["optimizer_bytes"] == 32 * many["optimizer_bytes"] > 0


def test_people_read_what_processes_share_and_exchange(plan: Plan) -> None:
    told = " ".join(plan(*GPUS, *SHARDED).out.split())
    assert "an estimate, within 3% of traced steps: " in told and "a process at its peak" in told
    assert "512 share the network (fsdp) and exchange in each step: all_gather " in told and "80 GB are there" in told


def test_one_process_exchanges_nothing_and_its_plan_says_nothing_of_it(plan: Plan) -> None:
    assert planned(plan, *FP32)["exchanges"] == [] and "all_" not in plan(*FP32).out


REFUSED = {
    "training.processes=9": "576 in all, but training.global_batch = 512; rule: every process has a row of the batch",
    "training.global_batch=768": "512 processes cannot share 768 micro-batches",
    "training.processes=7": "448 processes cannot share 512 micro-batches",
    "model.n_embd=65536": "a process, 80 GB are available; not even 1 fits",
    "training.device=mps": "this machine is no Mac",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_be_is_refused(plan: Plan, setting: str) -> None:
    gpus = GPUS if "mps" not in setting else ()
    ended = plan(*gpus, "--set", setting)
    assert ended.code == 2 and REFUSED[setting] in ended.err


@pytest.mark.parametrize("setting", ["training.processes=513", "training.global_batch=768"])
def test_a_plan_refuses_processes_in_the_words_of_the_start(plan: Plan, cairn: Cairn, setting: str) -> None:
    words = ("--set", "training.processes=512", "--set", setting)
    assert plan(*words).err == cairn("train", "run.toml", *words).err != ""


@pytest.mark.parametrize("words", [("--machines", "2"), ("--gpu-memory", "80")])
def test_machines_are_named_for_a_plan_alone(cairn: Cairn, plan: Plan, words: tuple[str, ...]) -> None:
    ended = cairn("train", "run.toml", *words)
    assert ended.code == 2 and "rule: with --dry-run" in ended.err


@pytest.mark.parametrize("words", [("--machines", "-1"), ("--gpu-memory", "-1"), ("--gpu-memory", "inf")])
def test_machines_that_cannot_be_are_refused(plan: Plan, words: tuple[str, ...]) -> None:
    assert plan(*words).code == 2


@pytest.mark.slow  # beside: test_processes_on_machines_that_are_not_there_are_planned_for
@pytest.mark.parametrize(("architecture", "mode"), [("gpt2", "ddp"), ("qwen3", "fsdp")])
def test_a_checkpoint_of_four_processes_holds_the_bytes_that_were_planned(
    plan: Plan, cairn_process: Cairn, tmp_path: Path, architecture: str, mode: str
) -> None:
    settings = {
        "training.processes": 4,
        "training.parallel": mode,
        "training.precision": "fp32",
        "training.steps": 2,
        "training.global_batch": 8,
        "model.architecture": architecture,
        "model.n_embd": 16,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    before = planned(plan, *words)
    assert cairn_process("train", "run.toml", *words).code == 0
    log = RunLog(LocalStore(tmp_path / "store"), "run").refresh()
    assert log.newest_committed is not None
    shards = read_manifest(LocalStore(tmp_path / "store"), log.newest_committed.committed.reference).shards
    tensors = [tensor for shard in shards for tensor in shard.tensors if tensor.shape]  # the rest count steps
    assert before["room"]["bytes_each"] == sum(tensor.bytes for tensor in tensors)
    after = planned(plan, *words)["cost"]
    assert after["measured_processes"] == 4 and 0 < after["commit_seconds"] < 60
