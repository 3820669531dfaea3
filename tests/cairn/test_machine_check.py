"""What `cairn doctor` says of CUDA devices, on machines that have none, and of a store that deletes nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cairn.model.kernels import head_loss
from cairn.operations.checks import _device, _store
from cairn.storage.errors import StoreRefused
from cairn.storage.stores.local_store import LocalStore


@pytest.fixture
def device_line(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def line(*names: str, compiler: bool = True) -> str:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])
        monkeypatch.setattr(head_loss, "can_compile", lambda device: compiler)
        return _device()

    return line


def test_each_device_is_named_with_the_rate_of_its_data_sheet(device_line: Callable[..., str]) -> None:
    said = device_line("NVIDIA H200", "NVIDIA A10")
    assert said == "cuda: NVIDIA H200 (989 TFLOP/s by its data sheet), NVIDIA A10 (125 TFLOP/s by its data sheet)"


def test_a_device_without_a_known_rate_says_so(device_line: Callable[..., str]) -> None:
    assert device_line("A Toy") == "cuda: A Toy (not in the table of data sheets)"


def test_a_machine_that_cannot_make_kernels_says_what_is_missing(device_line: Callable[..., str]) -> None:
    assert "Triton or a C compiler is missing" in device_line("NVIDIA L4", compiler=False)


def test_a_store_that_deletes_nothing_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(store: LocalStore, key: str) -> None:
        raise StoreRefused(f"{key}: cannot delete: AccessDenied")

    monkeypatch.setattr(LocalStore, "delete", refuse)
    with pytest.raises(RuntimeError, match="AccessDenied: objects are written there and never deleted"):
        _store(str(tmp_path / "store"))
