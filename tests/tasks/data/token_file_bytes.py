"""Token files as other trainers write them, made without the code under test."""

import io
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEGATRON_TYPES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}


def llm_c(tokens: NDArray[Any], *, magic: int = 0, version: int = 0, count: int = -1) -> bytes:
    """The file as llm.c's dataloader expects it: GPT-2's of uint16, Llama 3's of uint32."""
    known = (20240520, 1) if tokens.itemsize == 2 else (20240801, 7)
    count = len(tokens) if count < 0 else count
    return struct.pack("<256i", magic or known[0], version or known[1], count, *[0] * 253) + tokens.tobytes()


def npy(array: NDArray[Any], **options: Any) -> bytes:
    """The file that numpy.save makes."""
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def megatron_index(
    lengths: Sequence[int], borders: Sequence[int], dtype: np.dtype[Any], *, version: int = 1, shift: int = 0
) -> bytes:
    """The index of sequences and documents as Megatron's _IndexWriter writes it."""
    starts = [shift + start * dtype.itemsize for start in accumulate(lengths, initial=0)][:-1]
    code = MEGATRON_TYPES[dtype.str[1:]]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, len(lengths), len(borders))
    arrays = np.array(lengths, "<i4"), np.array(starts, "<i8"), np.array(borders, "<i8")
    return head + b"".join(array.tobytes() for array in arrays)
