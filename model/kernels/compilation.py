"""What is compiled on an accelerator, and how, so that its bits can be the same in every process.

Owns the compiler's options and the question whether there is one. Refuses to decide what is worth compiling. Left to
itself the compiler times variants of a kernel on the device and keeps the fastest, and another process may keep another
one, which sums in another order; its deterministic mode chooses by rule.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

_OLDEST_CAPABILITY = (7, 0)
"""What Triton makes code for; older devices have no matrix units either."""

Options = dict[str, str | int | bool | Callable[..., Any]]


def compile_options() -> Options:
    """Return the options under which no timing decides which kernel is taken."""
    return {"deterministic": True}


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Whether kernels can be made for `device` here: a CUDA device, Triton, and the C compiler it starts."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < _OLDEST_CAPABILITY:
        return False
    return "CC" in os.environ or any(shutil.which(name) for name in ("gcc", "clang", "cc"))
