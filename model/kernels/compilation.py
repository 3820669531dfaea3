"""Options for torch.compile under which every process gets the same bits, and whether a compiler is available.

By default the compiler times kernel variants and keeps the fastest, so two processes may sum in different orders.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

_MIN_TRITON_CAPABILITY = (7, 0)


def compile_options() -> dict[str, str | int | bool | Callable[..., Any]]:
    """Return the options under which no timing chooses a kernel."""
    return {"deterministic": True}


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Whether kernels can be compiled for `device`: it is CUDA, and Triton and a C compiler are installed."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < _MIN_TRITON_CAPABILITY:
        return False
    return "CC" in os.environ or any(shutil.which(name) for name in ("gcc", "clang", "cc"))
