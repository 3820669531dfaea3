"""Options for torch.compile under which every process gets the same bits (nothing timed), and whether it is there."""

import functools
import importlib.util
import os
import shutil
from typing import Any

import torch

COMPILE_OPTIONS: dict[str, Any] = {"deterministic": True}
"""No timing chooses a kernel."""


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Whether kernels can be compiled for `device`: it is CUDA, and Triton and a C compiler are installed."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < (7, 0):  # Triton's minimum
        return False
    return "CC" in os.environ or any(shutil.which(name) for name in ("gcc", "clang", "cc"))
