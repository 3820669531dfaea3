"""What the trainer's surroundings make of a CUDA device: run with `pytest -m gpu`, or by `make gpu-check`."""

from pathlib import Path

import pytest
import torch

from cairn.model.training.train_state import NamedTensor
from cairn.tasks.machine.machine_speed import device_name, free_device_bytes, machine_speed, may_have_cuda
from cairn.tasks.trainer.staging_buffer import StagingBuffer
from tests.device import device_under_test

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda() -> torch.device:
    """The device under test."""
    return device_under_test()


@pytest.fixture
def only_cuda(cuda: torch.device) -> torch.device:
    """The device under test, where it is CUDA."""
    if cuda.type != "cuda":
        pytest.skip("says something of CUDA alone")
    return cuda


def tensors(device: torch.device, count: int) -> tuple[NamedTensor, ...]:
    """Return tensors of some megabytes in two number formats."""
    made = [torch.randn(1000 * (number + 1), device=device) for number in range(count)]
    made += [torch.arange(500_000, device=device)]
    return tuple(NamedTensor(name=f"{number:03}", group="weights", tensor=each) for number, each in enumerate(made))


def test_the_files_of_a_driver_are_found(only_cuda: torch.device) -> None:
    assert may_have_cuda()


def test_the_driver_gives_the_name_that_torch_gives(only_cuda: torch.device) -> None:
    assert device_name("cuda:0") == torch.cuda.get_device_name(only_cuda)


def test_free_memory_is_what_torch_says(only_cuda: torch.device) -> None:
    free, total = torch.cuda.mem_get_info(only_cuda)
    said = free_device_bytes("cuda")
    assert said is not None and abs(said - free) < 0.02 * total


def test_a_measured_machine_has_half_precision(only_cuda: torch.device, tmp_path: Path) -> None:
    speed = machine_speed(tmp_path)
    assert speed.has_cuda and speed.cuda_has_half


def test_a_copy_of_a_state_has_its_bytes_and_a_longer_one_too(cuda: torch.device) -> None:
    buffer = StagingBuffer(cuda)
    for count in (3, 40):
        live = tensors(cuda, count)
        buffer.prepare(live)
        copies = buffer.copy(live)
        assert all(torch.equal(copy.tensor, named.tensor.cpu()) for copy, named in zip(copies, live, strict=True))


def test_the_memory_of_the_copy_is_page_locked(only_cuda: torch.device) -> None:
    buffer = StagingBuffer(only_cuda)
    (first, *_) = buffer.copy(tensors(only_cuda, 3))
    assert first.tensor.is_pinned()
