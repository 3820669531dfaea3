"""Sizes of the blocks that kernels compute at a time: attention's query blocks, the loss head's logits.

The memory estimate reads the same numbers. No torch here.
"""

HEAD_CHUNK_BYTES = 128 * 2**20
"""Logits in fp32 that fused kernels hold at once: enough for the matrix product, small beside so large a vocabulary."""

DEVICE_HEAD_CHUNK_BYTES = 2**30
"""The same on an accelerator, in the computing precision: its products are fast only where they are large."""

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
