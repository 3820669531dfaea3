"""How causal attention on a CPU is cut into blocks of queries.

Owns the cut, which kernels and the estimate of their memory share. Refuses to know torch.
"""

SMALLEST_BLOCK = 64
MOST_BLOCKS = 4
"""More blocks save fewer products than the smaller ones lose: measured at T = 64, 256 and 1024."""


def query_blocks(time: int) -> list[tuple[int, int]]:
    """Return where each block of `time` queries begins and ends; each meets the keys before its end."""
    size = max(SMALLEST_BLOCK, -(-time // MOST_BLOCKS))
    return [(begin, min(begin + size, time)) for begin in range(0, time, size)]


def kept_probabilities(time: int) -> int:
    """Return how many probabilities the blocks of one head keep for the backward pass."""
    return sum((end - begin) * end for begin, end in query_blocks(time))
