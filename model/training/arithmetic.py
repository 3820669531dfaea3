"""The arithmetic that a process computes with: what of processor, libraries and flags changes bits, and a common set.

The libraries choose their kernels by the processor; each reads its own variable when it first computes. Sources: ATen's
`get_cpu_capability`, oneDNN's "CPU Dispatcher Control", oneMKL's "Conditional Numerical Reproducibility".
"""

import os
import re
from dataclasses import dataclass

import torch

from cairn.model.configuration.training import Arithmetic
from cairn.model.errors import InvalidInput

PORTABLE = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
"""The narrowest instructions that every x86-64 server of the last ten years has."""
_CHOOSING = (*PORTABLE, "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_DEFAULT_FPMATH_MODE")
_BUILD = re.compile(r"- .*?(Math Kernel Library Version|MKL-DNN|OpenBLAS|BLAS_INFO=)\s*v?([\w.]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticFacts:
    """An accelerator's name, empty for a CPU; the vector instructions; libraries and their versions; flags."""

    accelerator: str
    instructions: str
    libraries: str
    flags: str


def choose_arithmetic(name: Arithmetic) -> None:
    """Have this process compute with the portable set, if that is asked for, before its first computation.

    Raises InvalidInput if the process has computed with another one, or the processor does not have it.
    """
    if name == "native":
        return
    for variable in _CHOOSING:
        os.environ.pop(variable, None)
    os.environ.update(PORTABLE)
    if (found := torch.backends.cpu.get_cpu_capability()) != "AVX2":
        rule = "a processor with AVX2, and a process that has not computed yet"
        raise InvalidInput(f"training.arithmetic = 'portable': this process computes with {found}; rule: {rule}")


def arithmetic_facts(device: torch.device) -> ArithmeticFacts:
    """Return what changes the bits that this process computes on this device, beside the processor."""
    # What the first variable comes to is known.
    chosen = [f"{name}={os.environ[name]}" for name in sorted(_CHOOSING[1:]) if os.environ.get(name)]
    libraries = [f"torch {torch.__version__}"]
    flags = [
        f"float32 products {torch.get_float32_matmul_precision()}",
        f"oneDNN {'on' if torch.backends.mkldnn.enabled else 'off'}",
    ]
    accelerator = ""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        accelerator = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        libraries += [f"CUDA {torch.version.cuda or torch.version.hip}", f"cuDNN {torch.backends.cudnn.version()}"]
        allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        flags += [f"TF32 {allowed}", f"cuBLAS {os.environ.get('CUBLAS_WORKSPACE_CONFIG', '')}"]
    found = _BUILD.findall(torch.__config__.show())
    libraries += [f"{name.removesuffix(' Library Version').strip('=')} {version}" for name, version in found]
    return ArithmeticFacts(
        accelerator=accelerator,
        instructions=" ".join([f"ATen {torch.backends.cpu.get_cpu_capability()}", *chosen]),
        libraries=", ".join(libraries),
        flags=", ".join(flags),
    )
