"""Data-parallel training in several processes; the only importer of `torch.distributed` in this package.

Each rank takes a contiguous share of the batch's rows, weighted by its samples, so the gradient is the mean over the
whole batch. Equal numbers of processes give equal bits, through kill and resume; other numbers agree up to rounding.
Sources: Li et al. 2020, "PyTorch Distributed"; Zhao et al. 2023, "PyTorch FSDP"; `torch.distributed.fsdp.fully_shard`.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from model.architectures.gpt import GPT
from model.configuration.training import Parallel

T = TypeVar("T")

_COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Never reached: the watchdog of the trainer detects hangs and ends all ranks."""
_PEER_LOSS_MESSAGES = ("closed by peer", "reset by peer", "gloo/transport", "NCCL", "Broken pipe", "Connection refused")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train one model; with one process every method is a no-op."""

    rank: int = 0
    size: int = 1
    mode: Parallel = "ddp"
    _relay: Any = field(default=None, repr=False, compare=False)
    _wrapped: list[Any] = field(default_factory=list, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports for all ranks."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only its part of every tensor, so that all must run every forward."""
        return self.size > 1 and self.mode == "fsdp"

    def rows(self, batch_size: int) -> slice:
        """Return this rank's rows of a step's batch: contiguous, and shares differ by at most one row."""
        return slice(batch_size * self.rank // self.size, batch_size * (self.rank + 1) // self.size)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; a collective call with one answer."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)], dtype=torch.int64)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags.item())

    def broadcast(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of rank 0; the other ranks pass as many of any value."""
        if self.size == 1:
            return numbers
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(values, src=0)
        return tuple(values.tolist())

    def combine(self, losses: Tensor) -> Tensor:
        """Sum all ranks' weighted losses (n,), n per rank, to the batch's loss (1,); one process keeps (n,)."""
        if self.size == 1:
            return losses
        total = losses.sum().reshape(1)  # () -> (1,)
        dist.all_reduce(total)
        return total / self.size

    def loss_weight(self, samples: int, global_batch: int) -> float:
        """Return the factor of a part's mean loss that makes the mean of all ranks' gradients that of the batch."""
        return samples * self.size / global_batch

    def wrap(self, model: GPT, device: torch.device) -> None:
        """Connect the model to the other ranks, before its optimizer is made: `ddp` averages gradients, `fsdp` shards.

        `find_unused_parameters` keeps the first order of `ddp`'s buckets. By default they are rebuilt after the first
        step, so more than two ranks would round the first step after a resume in another order.
        """
        if self.size == 1:
            return
        if self.mode == "fsdp":
            _shard(model, self.size, device)
            self._wrapped.append(model)
        else:
            self._wrapped.append(nn.parallel.DistributedDataParallel(_Callable(model), find_unused_parameters=True))

    def forward(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that runs the model, so that its backward pass reaches the other ranks."""
        if self.size == 1 or self.is_sharded:
            return function(*arguments)
        result: T = self._wrapped[0](function, *arguments)
        return result

    @contextlib.contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        """Exchange gradients in the block's backward pass only if it is the step's last."""
        if self.size == 1:
            yield
        elif self.is_sharded:
            self._wrapped[0].set_requires_gradient_sync(is_last)
            yield
        else:
            with contextlib.nullcontext() if is_last else self._wrapped[0].no_sync():
                yield

    def send_to_first(self, values: Tensor) -> None:
        """Send a host tensor to rank 0 in the process group of background threads."""
        dist.send(values, dst=0, group=self._relay)

    def receive_from(self, rank: int, values: Tensor) -> None:
        """Fill a host tensor with the one that `rank` sends, in the process group of background threads."""
        dist.recv(values, src=rank, group=self._relay)

    def dropout_seed(self, seed: int, step: int) -> int | None:
        """Return the seed of this rank's dropout in a step; None for rank 0, whose generator is in the train state.

        It depends on nothing else, so a resume with any number of ranks is well defined.
        """
        if self.is_first:
            return None
        digest = hashlib.sha256(f"dropout/{seed}/{step}/{self.rank}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


SINGLE_RANK = Ranks()


def join_ranks(rank: int, size: int, *, mode: Parallel, device: torch.device, store: Store) -> Ranks:
    """Join the process group through `store`; host tensors use gloo, GPU tensors NCCL."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    # A second group, so that a background thread does not mix with the exchange of the steps.
    return Ranks(rank, size, mode, dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT))


def gather_full(tensor: Tensor) -> Tensor:
    """Return the full tensor; for a sharded one this is a collective call."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


@torch.no_grad()
def copy_into(target: Tensor, values: Tensor) -> None:
    """Copy full values into a tensor, or this rank's part of them into a sharded one, without communication."""
    placements = getattr(target, "placements", None)
    if placements is not None:
        from torch.distributed.tensor import distribute_tensor

        mesh = target.device_mesh  # type: ignore[attr-defined]
        values = distribute_tensor(values.to(target.device), mesh, placements, src_data_rank=None)
    target.copy_(values)


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exception only reports that another process is gone, whose own error is then the cause."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _PEER_LOSS_MESSAGES)


class _Callable(nn.Module):
    """Lets DDP wrap a function around the model's forward, such as the fused head."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def _shard(model: GPT, size: int, device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (size,))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in ("hidden", "extend"):
        register_fsdp_forward_method(model, method)
