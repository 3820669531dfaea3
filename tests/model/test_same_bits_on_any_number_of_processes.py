"""One run on 1, 2 and 4 processes, moved in the middle: the same bits; and uneven shares under sharding."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.model.rank_legs import Leg, encode_legs, read_state
from tests.model.tiny_run import TinyRun
from tests.processes.fork_server import fork_server

PROCESSES = 4
STEPS = 8
MODES: dict[str, dict[str, Any]] = {
    "fp32": {"global_batch": 16, "micro_batch": 2},
    "bf16 fused": {"global_batch": 15, "micro_batch": 4, "precision": "bf16", "kernels": "fused"},
}
DROPOUT = {"dropout": 0.2}


def moved(folder: Path, mode: str) -> list[Leg]:
    """The run on one process, two, four, two and one, from the middle on with activations computed again."""
    legs, begin = [], ""
    for number, size in enumerate((1, 2, 4, 2, 1), start=1):
        until, end = (STEPS if number == 5 else number + number // 4), str(folder / f"{mode}-{number}.npz")
        settings = {**MODES[mode], "steps": STEPS, "activation_checkpointing": number > 2}
        legs.append(Leg(size=size, until_step=until, settings=settings, model=DROPOUT, begin=begin, end=end))
        begin = end
    return legs


def uneven(folder: Path) -> Leg:
    """Two sharded processes, of which one has a micro-batch more than the other if each cuts its own share."""
    settings = {"global_batch": 9, "micro_batch": 4, "steps": STEPS, "parallel": "fsdp"}
    return Leg(size=2, until_step=2, settings=settings, end=str(folder / "uneven.npz"))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """The last state of each run, all trained by the same four processes."""
    folder = tmp_path_factory.mktemp("legs")
    legs = [leg for mode in MODES for leg in moved(folder, mode)] + [uneven(folder)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [sys.executable, "-m", "tests.model.rank_legs"]
    processes = [
        fork_server().popen([*words, str(rank), str(store.port), encode_legs(legs)]) for rank in range(PROCESSES)
    ]
    assert [process.wait() for process in processes] == [0] * PROCESSES
    return {name: read_state(folder / f"{name}.npz") for name in (*(f"{mode}-5" for mode in MODES), "uneven")}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_moved_between_numbers_of_processes_ends_in_the_bits_of_one_process(
    ended: dict[str, dict[str, torch.Tensor]], mode: str
) -> None:
    alone = TinyRun(model=DROPOUT, steps=STEPS, **MODES[mode])
    alone.train(STEPS)
    found = ended[f"{mode}-5"]
    assert {name: tensor.numpy().tobytes() for name, tensor in found.items()} == alone.bits()


def test_uneven_shares_complete_under_sharding(ended: dict[str, dict[str, torch.Tensor]]) -> None:
    assert int(ended["uneven"]["step"]) == 2
