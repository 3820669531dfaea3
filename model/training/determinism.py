"""Process-wide determinism settings, the arithmetic that a process computes with, and the seeds of dropout.

Promised: equal state, batches, device kind, micro-batch and thread count give an equal next state, bit for bit, on one
kind of machine, on any number of replicated processes, in every precision, with dropout, accumulation and activation
checkpointing (which changes no bit), compiled on CUDA. Not promised: equal bits across kinds of machines, library
versions, thread counts, micro-batch sizes, or compiled on a CPU.
The libraries choose their kernels by the processor; each reads its own variable when it first computes. Sources: ATen's
`get_cpu_capability`, oneDNN's "CPU Dispatcher Control", oneMKL's "Conditional Numerical Reproducibility".
"""

import contextlib
import ctypes
import hashlib
import os
import random
import re
import sys

import numpy as np
import torch

from cairn.model.configuration.training import Arithmetic
from cairn.model.errors import InvalidInput
from cairn.model.kernels.block_sizes import LARGEST_POOLED_BYTES

_LARGEST_PRODUCT_ERROR, _OPENMP = 2.0, ("OMP_", "KMP_", "GOMP_", "MKL_")
"""bf16 rounds sums of 256 products of numbers around 1 by at most a quarter."""
PORTABLE = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
"""The narrowest instructions that every x86-64 server of the last ten years has."""
_CHOOSING = (*PORTABLE, "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_DEFAULT_FPMATH_MODE")
_BUILD = re.compile(r"- .*?(Math Kernel Library Version|MKL-DNN|OpenBLAS|BLAS_INFO=)\s*v?([\w.]*)")


def resolve_device(name: str) -> torch.device:
    """Turn the name of a device or `auto` into a device of this machine; a missing one raises InvalidInput.

    A CUDA device always has its number, which a thread needs to make it its own.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= (count := torch.cuda.device_count()):
            raise InvalidInput(f"device={name!r}: this machine has {count} CUDA devices; use 'auto' or 'cpu'")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise InvalidInput(f"device={name!r}: this machine's torch has no Apple GPU; use 'auto' or 'cpu'")
    return device


def make_deterministic(*, seed: int, threads: int | None, arithmetic: Arithmetic = "native") -> None:
    """Choose the arithmetic, seed generators, fix the threads (None: torch's own) and deterministic kernels.

    To be called before the first computation.
    """
    choose_arithmetic(arithmetic)
    keep_freed_memory()  # changes no bit; a step on a CPU reuses the same blocks
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.set_num_threads(threads if threads is not None else torch.get_num_threads())
    require_right_products()
    # Deterministic kernels for the whole process; compiled ones are chosen by `COMPILE_OPTIONS`.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # As use_deterministic_algorithms(True), which also imports the compiler: a second that an evaluator does not need.
    torch.set_deterministic_debug_mode("error")
    # Filling new memory only helps to find reads of uninitialised memory, and costs a pass over every buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    # The memory-efficient attention kernel has no deterministic backward; flash has one.
    torch.backends.cuda.enable_mem_efficient_sdp(False)


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


def arithmetic_facts(device: torch.device) -> tuple[str, str, str, str]:
    """Return what changes the bits that this process computes on this device, beside the processor.

    An accelerator's name, empty for a CPU; the vector instructions; libraries and their versions; flags.
    """
    # What the first variable comes to is known.
    chosen = [f"{name}={os.environ[name]}" for name in sorted(_CHOOSING[1:]) if os.environ.get(name)]
    libraries = [f"torch {torch.__version__}"]
    onednn = "on" if torch.backends.mkldnn.enabled else "off"
    flags = [f"float32 products {torch.get_float32_matmul_precision()}", f"oneDNN {onednn}"]
    accelerator = ""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        accelerator = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        libraries += [f"CUDA {torch.version.cuda or torch.version.hip}", f"cuDNN {torch.backends.cudnn.version()}"]
        allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        flags += [f"TF32 {allowed}", f"cuBLAS {os.environ.get('CUBLAS_WORKSPACE_CONFIG', '')}"]
    found = _BUILD.findall(torch.__config__.show())
    libraries += [f"{name.removesuffix(' Library Version').strip('=')} {version}" for name, version in found]
    instructions = " ".join([f"ATen {torch.backends.cpu.get_cpu_capability()}", *chosen])
    return accelerator, instructions, ", ".join(libraries), ", ".join(flags)


def require_right_products() -> None:
    """Multiply in bf16 and compare with fp32; raises InvalidInput where OpenMP gives fewer threads than are asked for.

    oneDNN cuts a product for the threads that it was told, and leaves out the parts that none of them computes.
    """
    left, right = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    error = float((left @ right - left.float() @ right.float()).abs().max())
    if not error < _LARGEST_PRODUCT_ERROR:  # nor NaN
        given = ", ".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(_OPENMP))
        problem = f"bf16 products of this process are wrong by {error:g} with {torch.get_num_threads()} threads"
        rule = "unset what limits OpenMP's threads, such as OMP_THREAD_LIMIT or OMP_DYNAMIC, before torch is imported"
        raise InvalidInput(f"{problem}; rule: {rule} ({given or 'none of its variables is set now'})")


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory, so that the next step finds it without new pages; False where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return False
    options = ((-3, LARGEST_POOLED_BYTES), (-1, 2**31 - 1))  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3)
    return all(library.mallopt(option, value) == 1 for option, value in options)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the process's generators of the CPU and of this device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    if device.type == "mps":
        torch.mps.manual_seed(seed)


def keeping_generators(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """After the block the process's generators are as before."""
    if device.type == "mps":
        return torch.random.fork_rng([device], device_type="mps")
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """Return the seed of one micro-batch's dropout: the same on whatever process, and after any resume."""
    digest = hashlib.sha256(f"dropout/{seed}/{step}/{micro_batch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
