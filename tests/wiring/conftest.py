"""The worlds of the wiring tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cairn.model.estimates import utilization
from tests.processes.fork_server import SMALL_PRODUCTS
from tests.tasks.trainer_in_process import TrainingWorld
from tests.wiring.flow_in_process import FlowWorld, answer_for_evaluators


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Several threads only wait for each other on tensors of this size, and the peak needs no larger ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilization, "_CPU_SIZES", SMALL_PRODUCTS)
        yield
    torch.set_num_threads(before)


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FlowWorld:
    """The flow without Prefect, with text and an empty store."""
    world = FlowWorld(tmp_path)
    answer_for_evaluators(monkeypatch, world)
    return world


@pytest.fixture
def world(tmp_path: Path) -> TrainingWorld:
    """A snapshot, and trainers of it in this process."""
    return TrainingWorld(tmp_path)
