"""Speed of this machine, by its data sheet or measured, and how much of it training uses: FLOP/s, bf16 gain, memory.

Sources: Chowdhery et al. 2022, "PaLM", appendix B (6N + 12 L d T FLOPs per token, forward and backward); the vendors'
data sheets (devices.toml).
"""

import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import psutil
import torch

from cairn.model.configuration.network import ModelConfig, parameter_table
from cairn.model.configuration.training import Precision
from cairn.model.estimates.numerics import MachineSpeed

_PEAK_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MIN_FREE_BYTES = 2**31
"""With less free memory an accelerator gets smaller matrices: three of the large ones take 800 MB in fp32."""
_CPU_SIZES: tuple[int, ...] = (256, 512, 1024)
_CPU_SECONDS = 0.3
"""The measurement on a CPU goes from small to large matrices and stops after these seconds."""
_GAIN_MATRIX_SIZE = 512
GAIN_TURNS, GAIN_PRODUCTS = 9, 4


def flops_per_token(config: ModelConfig, *, vocab_size: int, frozen: bool = False, parameters: int = 0) -> int:
    """FLOPs to train on one token; tables that are only looked up do no matrix work, `frozen` weights no gradient.

    Of a module, of which only its number of `parameters` is known, six for each of these.
    """
    if config.module:
        return 6 * parameters
    looked_up = {"positions", "ngrams"} | (set() if config.tied else {"embedding"})
    working = sum(row.count for row in parameter_table(config, vocab_size) if row.kind not in looked_up)
    return (4 if frozen else 6) * working + 12 * config.n_layer * config.block_size * config.attention_width


def peak_flops(device: torch.device, precision: Precision, workers: int = 1) -> float:
    """Return the FLOP/s of one device that MFU is a share of: its data sheet's, else those measured for the workers."""
    return _specified_flops(device, precision) or measure_peak_flops(device, precision, workers)


def peak_source(device: torch.device, precision: Precision) -> str:
    """Return where `peak_flops` comes from: `data sheet` or `measured`."""
    return "data sheet" if _specified_flops(device, precision) else "measured"


@cache
def _specified_flops(device: torch.device, precision: Precision) -> float | None:
    return peak_flops_of_device(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def peak_flops_of_device(device_name: str, precision: Precision) -> float | None:
    """Return the specified FLOP/s of the device of this name in `precision`; None where it is not listed."""
    if precision not in ("bf16", "fp16"):
        return None
    listed = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
    words = f" {device_name} "
    for part, teraflops in (listed["both"] | (listed["fp16"] if precision == "fp16" else {})).items():
        if any(f"{before}{part}{behind}" in words for before in " -" for behind in " -"):
            return float(teraflops) * 1e12
    return None


def measure_peak_flops(device: torch.device, precision: Precision, workers: int = 1) -> float:
    """Return the best matmul rate in FLOP/s, measured once per process in about 0.3 s, with its own generator."""
    with using_threads(torch.get_num_threads() * workers) as threads:
        return _best_product(device, precision, threads)


@contextmanager
def using_threads(threads: int) -> Iterator[int]:
    """Compute with so many threads in the block, and with as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)


@cache
def _best_product(device: torch.device, precision: Precision, threads: int) -> float:
    is_cuda = device.type == "cuda"
    sizes, products, turns = _CPU_SIZES, 1, 8
    if is_cuda:
        sizes, products, turns = (4096 if torch.cuda.mem_get_info(device)[0] < _MIN_FREE_BYTES else 8192,), 10, 5
    began, best = time.perf_counter(), 0.0
    # The first products wake threads, clocks and caches, so the best of several turns counts.
    for size in sizes:
        # Of random numbers: equal ones take less power and are too fast.
        generator, dtype = torch.Generator(device).manual_seed(0), _PEAK_DTYPES[precision]
        left, right = (torch.randn((size, size), generator=generator, dtype=dtype, device=device) for _ in range(2))
        multiply = partial(torch.mm, left, right, out=torch.empty_like(left))
        for _ in range(turns):
            _synchronize(device)
            started = time.perf_counter()
            for _ in range(products):
                multiply()
            _synchronize(device)
            ended = time.perf_counter()
            best = max(best, 2.0 * products * float(size) ** 3 / max(ended - started, 1e-9))
            if not is_cuda and ended - began > _CPU_SECONDS:
                return best
    if is_cuda:  # read_memory_bytes reports the peak of training alone
        del multiply, left, right
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best


def read_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes allocated on a CUDA device, or the process's resident bytes on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def measure_machine() -> MachineSpeed:
    """Detect the CUDA device and time square products of the CPU in fp32 and bf16: about 0.2 s."""
    has_cuda = torch.cuda.is_available()
    has_half = has_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    return MachineSpeed(has_cuda=has_cuda, cuda_has_half=has_half, cpu_half_gain=measure_cpu_half_gain())


def measure_cpu_half_gain(clock: Callable[[], float] = time.thread_time) -> float:
    """Return the time of an fp32 product over a bf16 product's: the best of alternating turns, in seconds of a core."""
    with using_threads(1):
        single = torch.full((_GAIN_MATRIX_SIZE, _GAIN_MATRIX_SIZE), 1.0 / _GAIN_MATRIX_SIZE)
        half = single.bfloat16()
        turns = [(_time_products(single, clock), _time_products(half, clock)) for _ in range(GAIN_TURNS)]
    return min(fp32 for fp32, _ in turns[1:]) / min(bf16 for _, bf16 in turns[1:])  # the first turn warms up


def _time_products(matrix: torch.Tensor, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(GAIN_PRODUCTS):
        matrix @ matrix
    return max(clock() - started, 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if device.type == "mps":
        torch.mps.synchronize()
