"""How well the machine is used: FLOPs, measured peak, MFU, memory.

Owns the arithmetic of utilization. Refuses to know vendor data sheets: the peak is measured where it is used.
Source: Chowdhery et al. 2022, "PaLM", appendix B (6N + 12 L d T FLOPs per token, forward and backward).
"""

import functools
import time

import psutil
import torch

from model.configuration.network import ModelConfig
from model.configuration.training import Precision

_PEAK_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ROOM_BYTES = 2**31
"""Free memory below which an accelerator is given smaller matrices: three of the large ones take 800 MB in fp32."""


def flops_per_token(config: ModelConfig, parameter_count: int) -> int:
    """FLOPs to train on one token; `parameter_count` without the position table."""
    return 6 * parameter_count + 12 * config.n_layer * config.n_embd * config.block_size


@functools.cache
def measured_peak_flops(device: torch.device, precision: Precision) -> float:
    """Best matmul rate seen on `device`, in FLOP/s; measured once per process, from generators of its own.

    On random numbers: an accelerator multiplies equal ones with less power, and so faster than it ever will in use.
    """
    # The first products wake threads, clocks and caches, so several turns are timed and the best one counts.
    size, products, turns = (8192, 10, 5) if device.type == "cuda" else (1024, 1, 8)
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _ROOM_BYTES:
        size //= 2
    generator = torch.Generator(device).manual_seed(0)
    dtype = _PEAK_DTYPES[precision]
    left, right = (torch.randn((size, size), generator=generator, dtype=dtype, device=device) for _ in range(2))
    product, best = torch.empty_like(left), float("inf")
    for _ in range(turns):
        _wait(device)
        started = time.perf_counter()
        for _ in range(products):
            torch.mm(left, right, out=product)
        _wait(device)
        best = min(best, time.perf_counter() - started)
    if device.type == "cuda":  # training's own peak is what memory_bytes is to say
        del left, right, product
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2.0 * products * float(size) ** 3 / max(best, 1e-9)


def model_flops_utilization(*, flops_each_token: int, tokens_per_second: float, peak_flops: float) -> float:
    """Share of the measured peak that goes into the model: 0 to about 1."""
    return flops_each_token * tokens_per_second / peak_flops


def memory_bytes(device: torch.device) -> int:
    """Peak bytes allocated on a CUDA device, or the process's resident bytes on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
