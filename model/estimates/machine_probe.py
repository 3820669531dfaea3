"""What this machine's arithmetic is worth, measured.

Owns the measurement. Refuses to know what is made of it and where it is kept. Precisions take turns and the best turn
of each counts, in seconds of one core, so that whatever else the machine does meets both and moves neither.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from model.estimates.numerics import MachineSpeed

SIZE = 512
TURNS, PRODUCTS_EACH = 9, 4


def measure_machine() -> MachineSpeed:
    """Find out about the CUDA device, and time square products of the CPU in fp32 and bf16: about 0.2 s."""
    has_cuda = torch.cuda.is_available()
    return MachineSpeed(
        has_cuda=has_cuda,
        cuda_has_half=has_cuda and torch.cuda.is_bf16_supported(including_emulation=False),
        cpu_half_gain=cpu_half_gain(),
    )


def cpu_half_gain(clock: Callable[[], float] = time.thread_time) -> float:
    """Return the time of a product in fp32 over its time in bf16, each the best of its turns, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        single = torch.full((SIZE, SIZE), 1.0 / SIZE)
        half = single.bfloat16()
        turns = [(_seconds(single, clock), _seconds(half, clock)) for _ in range(TURNS)]
    finally:
        torch.set_num_threads(threads)
    return min(fp32 for fp32, _ in turns[1:]) / min(bf16 for _, bf16 in turns[1:])  # the first warms up


def _seconds(matrix: Tensor, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(PRODUCTS_EACH):
        matrix @ matrix
    return max(clock() - begin, 1e-9)
