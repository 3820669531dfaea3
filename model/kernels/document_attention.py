"""Attention within documents of different lengths on CUDA, without a mask of T x T.

Of the deterministic kernels there only PyTorch's math kernel takes a mask, and it keeps all T x T probabilities. Flash
attention takes the documents' bounds, and has a deterministic backward pass, which `determinism` asks for.
`torch.nn.attention.varlen` calls the same operator, but leaves out dropout.
Source: Dao 2023, "FlashAttention-2".
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels.block_sizes import fits_flash

_FIRST_CAPABILITY = (8, 0)


def document_starts(tokens: Tensor, boundary_id: int) -> Tensor:
    """Return where documents begin, at rows and ends of text, and the end: ids (B, T) -> int32 (documents + 1,)."""
    begins = tokens == boundary_id  # (B, T)
    begins[:, 0] = True
    starts = begins.flatten().nonzero()[:, 0]  # (B, T) -> (documents,)
    return F.pad(starts, (0, 1), value=tokens.numel()).to(torch.int32)


def takes_starts(device: torch.device, dtype: torch.dtype | None, head_width: int) -> bool:
    """Whether `attend_documents` can attend on this device, in this precision of autocast, None for fp32."""
    if device.type != "cuda" or dtype is None or not fits_flash(head_width):
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def attend_documents(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, dropout: float) -> Tensor:
    """Attend causally within documents: 3 x half (B, T, H, C/H), int32 (documents + 1,) -> (B, T, H, C/H)."""
    time = query.shape[1]  # an upper bound of a document's length that the host knows without waiting
    parts = (part.flatten(0, 1) for part in (query, key, value))  # (B, T, H, C/H) -> (BT, H, C/H)
    mixed: Tensor = torch.ops.aten._flash_attention_forward(*parts, starts, starts, time, time, dropout, True, False)[0]
    return mixed.view(query.shape)  # (BT, H, C/H) -> (B, T, H, C/H)
