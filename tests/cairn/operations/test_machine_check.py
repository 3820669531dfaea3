"""What `cairn doctor` says of CUDA devices, on machines that have none, and of a store that deletes nothing."""

from pathlib import Path

import pytest
import torch

from cairn.model.kernels import head_loss
from cairn.operations.checks import _device, _store
from cairn.storage.errors import StoreRefused
from cairn.storage.stores.local_store import LocalStore


@pytest.mark.parametrize(
    ("names", "compiler", "said"),
    [
        pytest.param(
            ("NVIDIA H200", "NVIDIA A10"),
            True,
            "cuda: NVIDIA H200 (989 TFLOP/s by its data sheet), NVIDIA A10 (125 TFLOP/s by its data sheet)",
            id="each with the rate of its data sheet",
        ),
        pytest.param(("A Toy",), True, "cuda: A Toy (not in the table of data sheets)", id="one without a known rate"),
        pytest.param(("NVIDIA L4",), False, "Triton or a C compiler is missing", id="one without a compiler"),
    ],
)
def test_devices_are_named(names: tuple[str, ...], compiler: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])
    monkeypatch.setattr(head_loss, "can_compile", lambda device: compiler)
    assert said in _device()


def test_a_store_that_deletes_nothing_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(store: LocalStore, key: str) -> None:
        raise StoreRefused(f"{key}: cannot delete: AccessDenied")

    monkeypatch.setattr(LocalStore, "delete", refuse)
    with pytest.raises(RuntimeError, match="AccessDenied: objects are written there and never deleted"):
        _store(str(tmp_path / "store"))
