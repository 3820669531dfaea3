"""A machine with a GPU of shapes alone: PyTorch's fake tensors on "cuda", in the CPU build, without a driver.

The device (fake_device.cpp) is compiled once for a version of PyTorch and kept in the environment. `install` is for a
process of its own: it replaces what would ask the driver, and what wants numbers where there are none.

    python -m tests.cuda.fake_cuda tests.cuda.trace …          the module, on such a machine
"""

import contextlib
import ctypes
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("fake_device.cpp")
LIKE = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132,
    max_threads_per_multi_processor=2048, warp_size=32, regs_per_multiprocessor=65536, L2_cache_size=50 * 2**20,
)  # fmt: skip
"""The device's properties."""
DOCUMENTS = 16
"""Of a batch within which documents are looked for."""


def main() -> None:
    """Run a module as a program, after `install`."""
    install()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__")


def missing() -> str | None:
    """Return why there can be no such device here."""
    if sys.platform != "linux":
        return "tried on Linux alone"
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "this build of PyTorch has a CUDA of its own"
    return None if compiler() else "there is no C++ compiler"


def compiler() -> str | None:
    """Return the C++ compiler."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def torch_folder() -> Path:
    """Return where PyTorch is, without importing it."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def library() -> Path:
    """Return the compiled device; the first process that needs it makes it, in some seconds."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    kept = Path(sys.prefix) if os.access(sys.prefix, os.W_OK) else Path(tempfile.gettempdir())
    made = kept / "fake-cuda" / f"{importlib.metadata.version('torch')}-{digest}.so"
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        own = made.with_suffix(f".{os.getpid()}")
        headers = torch_folder() / "include"
        words = ["-O1", "-shared", "-fPIC", "-std=c++20", f"-I{headers}", f"-I{headers}/torch/csrc/api/include"]
        subprocess.run([str(compiler()), *words, str(SOURCE), "-o", str(own)], check=True)
        own.replace(made)
    return made


def install() -> None:
    """Make this process one with a GPU; as PyTorch is imported it asks, once for all, whether there is one."""
    assert "torch" not in sys.modules
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library()))
    importlib.import_module("torch._dynamo")  # it lists the functions of torch.cuda, before they are replaced
    import torch

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "get_device_properties": lambda *_: LIKE,
        "get_device_capability": lambda *_: (LIKE.major, LIKE.minor), "get_device_name": lambda *_: LIKE.name,
        "is_bf16_supported": lambda *_, **__: True, "mem_get_info": lambda *_: (LIKE.total_memory, LIKE.total_memory),
        "_exchange_device": lambda *_: 0, "_maybe_exchange_device": lambda *_: 0,
        "device": lambda *_: contextlib.nullcontext(), "Event": _Event, "Stream": _Stream,
        "stream": lambda *_: contextlib.nullcontext(), "current_stream": lambda *_: _Stream(),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
        "get_rng_state": lambda *_: torch.empty(16, dtype=torch.uint8),
        **dict.fromkeys(("set_rng_state", "_lazy_init", "synchronize", "manual_seed", "set_device"), lambda *_: None),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    _replace_what_wants_numbers()


def _replace_what_wants_numbers() -> None:
    import torch
    from torch.distributed import device_mesh

    from cairn.model.kernels import head_loss
    from cairn.model.training import training_step

    torch.library.impl("aten::_fused_sgd_", "Meta")(lambda *_, **__: None)  # it works in place, and says nothing of it
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    from_numbers, make_mesh = torch.tensor, device_mesh.init_device_mesh
    device_mesh.init_device_mesh = lambda *given: _with_numbers(make_mesh, *given)

    def tensor(data: Any, dtype: Any = None, device: Any = "cpu") -> Any:
        """Forget the numbers that go to the device."""
        made = from_numbers(data, dtype=dtype)
        return made if torch.device(device).type == "cpu" else torch.empty(made.shape, dtype=made.dtype, device=device)

    torch.tensor = tensor  # type: ignore
    # How many documents there are is a number.
    training_step.document_starts = lambda *_: torch.empty(DOCUMENTS + 1, dtype=torch.int32)  # type: ignore
    if "NO_TRITON" in os.environ:
        head_loss.can_compile = lambda _: False  # type: ignore
    else:  # what Triton makes of it: one kernel, which leaves nothing but its two results
        head_loss._loss_and_gradient_on = lambda _: _one_kernel  # type: ignore


def _with_numbers(function: Callable[..., Any], *given: Any) -> Any:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return function(*given)


def _one_kernel(logits: Any, *_: Any) -> tuple[Any, Any]:
    import torch

    return logits.new_empty(len(logits), dtype=torch.float32), torch.empty_like(logits)


def _apply(module: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
    """Do the same with new parameters: a fake tensor cannot take another's place."""
    import torch

    for part in module.children():
        part._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = torch.nn.Parameter(function(parameter.detach()), parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


class _Event:
    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "_Event") -> float:
        return 1.0


class _Stream:
    def __init__(self, **_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def wait_event(self, _: _Event) -> None: ...

    def wait_stream(self, _: "_Stream") -> None: ...


if __name__ == "__main__":
    main()
