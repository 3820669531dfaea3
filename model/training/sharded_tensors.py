"""Tensors of which each rank holds some rows (`torch.distributed.fsdp.fully_shard`), or all of them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_full(tensor: Tensor) -> Tensor:
    """Return the full tensor; for a sharded one this is a collective call."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def gather_to(tensor: Tensor, rank: int) -> Tensor:
    """Return the full tensor on `rank`; for a sharded one this is a collective call, and others get their part back."""
    if getattr(tensor, "placements", None) is None:
        return tensor
    part, size = local_rows(tensor)[0], dist.get_world_size()
    rows = -(-tensor.shape[0] // size)
    if len(part) < rows:  # the last ranks have fewer, or none
        part = torch.cat((part, part.new_zeros(rows - len(part), *part.shape[1:])))
    whole = part.new_empty(rows * size, *part.shape[1:]) if dist.get_rank() == rank else part
    dist.gather(part, None if whole is part else list(whole.split(rows)), rank)
    return whole[: tensor.shape[0]]


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a sharded tensor and the number of the first; of any other tensor all of it."""
    if getattr(tensor, "placements", None) is None:
        return tensor, 0
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    rows = -(-tensor.shape[0] // mesh.size())  # as torch.chunk cuts them
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local, min(mesh.get_local_rank() * rows, tensor.shape[0])


@torch.no_grad()
def copy_into(target: Tensor, values: Tensor) -> None:
    """Copy full values into a tensor, or this rank's part of them into a sharded one, without communication."""
    local, first_row = local_rows(target)
    local.copy_(values if local is target else values[first_row : first_row + len(local)])
