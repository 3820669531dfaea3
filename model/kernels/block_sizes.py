"""Block sizes of the kernels, read by the memory estimate as well. Imports no torch."""

HEAD_CHUNK_BYTES = 128 * 2**20
"""fp32 logits that the fused head holds at once on a CPU: enough for an efficient matrix product."""
HELD_OUT_CHUNK_BYTES = 32 * 2**20
"""fp32 logits that a held-out loss holds at once: little beside what any training step takes."""
HELD_OUT_TOKENS = 4096
"""Tokens of a held-out loss that pass the network at once."""
DEVICE_HEAD_CHUNK_BYTES = 2**30
"""The same on an accelerator, in the computing precision: its matrix products are fast only when they are large."""
EXCHANGE_BYTES = 32 * 2**20
"""Gradients that replicated processes exchange at once; a larger tensor is exchanged by itself."""
LARGEST_POOLED_BYTES = 2**25
"""Larger blocks glibc maps one by one: the most that mallopt accepts, and pooling them raised the peak by half."""
WIDEST_FLASH_HEAD = 256
"""Numbers of a head that flash attention on CUDA takes; PyTorch pads narrower ones of plain attention."""
MIN_BLOCK = 64
MAX_BLOCKS = 4
"""More blocks lose more on small products than they save: measured at T = 64, 256 and 1024."""


def query_blocks(time: int) -> list[tuple[int, int]]:
    """Return [begin, end) of each block of `time` queries; a block attends to the keys before its end."""
    size = max(MIN_BLOCK, -(-time // MAX_BLOCKS))
    return [(begin, min(begin + size, time)) for begin in range(0, time, size)]


def saved_probabilities(time: int) -> int:
    """Return how many attention probabilities one head saves for the backward pass."""
    return sum((end - begin) * end for begin, end in query_blocks(time))


def fits_flash(head_width: int) -> bool:
    """Whether flash attention on CUDA takes heads of this width as they are, in half precision."""
    return head_width % 8 == 0 and head_width <= WIDEST_FLASH_HEAD
