"""One run on 1, 2 and 4 processes, moved in the middle: the same bits."""

from pathlib import Path
from typing import Any

import pytest

from tests.model.rank_legs import Leg, read_seen, read_state, train_legs
from tests.model.tiny_run import TinyRun
from tests.networks.own_files import nanogpt

PROCESSES = 4
STEPS = 4
MODES: dict[str, dict[str, Any]] = {
    "fp32": {"global_batch": 16, "micro_batch": 2},
    "bf16 fused": {"global_batch": 15, "micro_batch": 4, "precision": "bf16", "kernels": "fused", "has_answers": True},
    "qwen3 moved by muon": {"global_batch": 8, "micro_batch": 2, "optimizer": "muon", "precision": "bf16"},
    "adapters": {"global_batch": 12, "micro_batch": 3, "lora": {"rank": 2}, "precision": "bf16", "kernels": "fused"},
    "a module of one's own": {"global_batch": 8, "micro_batch": 2},
}
MODELS: dict[str, dict[str, Any]] = {
    "fp32": {"dropout": 0.2},
    "bf16 fused": {"dropout": 0.2},
    "qwen3 moved by muon": {"dropout": 0.2, "architecture": "qwen3", "n_kv_head": 1},
    "adapters": {"dropout": 0.2, "architecture": "qwen3", "n_kv_head": 1},
    "a module of one's own": {"dropout": 0.2, "module": "nano.py:build"},
}
SLOW_RANK = 2


def moved(folder: Path, mode: str) -> list[Leg]:
    """The run on one process, four and two, from the middle on with activations computed again."""
    legs, begin = [], ""
    for number, (size, until) in enumerate(((1, 1), (4, 2), (2, STEPS)), start=1):
        end = str(folder / f"{mode}-{number}.npz")
        settings = {**MODES[mode], "steps": STEPS, "activation_checkpointing": number > 2}
        slow = SLOW_RANK if (size, mode) == (4, "fp32") else None
        model = MODELS[mode]
        leg = Leg(size=size, until_step=until, settings=settings, model=model, begin=begin, end=end, slow_rank=slow)
        legs.append(leg)
        begin = end
    return legs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What became of each leg, all trained by the same four processes."""
    folder = tmp_path_factory.mktemp("legs")
    legs = [leg for mode in MODES for leg in moved(folder, mode)]
    train_legs(legs, processes=PROCESSES)
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_a_run_moved_between_numbers_of_processes_ends_in_the_bits_of_one_process(folder: Path, mode: str) -> None:
    files = nanogpt() if "module" in MODELS[mode] else None
    alone = TinyRun(model=MODELS[mode], files=files, steps=STEPS, **MODES[mode])
    alone.train(STEPS)
    found = read_state(folder / f"{mode}-3.npz")
    assert {name: tensor.numpy().tobytes() for name, tensor in found.items()} == alone.bits()


def test_the_record_of_a_step_names_the_rank_that_the_others_waited_for(folder: Path) -> None:
    for record in read_seen(folder / "fp32-2.npz")["records"]:
        assert record["slowest_rank"] == SLOW_RANK
        assert record["slowest_rank_seconds"] > max(0.5, record["median_rank_seconds"])
    assert {record["slowest_rank"] for record in read_seen(folder / "fp32-1.npz")["records"]} == {None}
