"""Several processes that train one model together: who takes which rows, and how their gradients become one.

Owns everything the model's side knows of a process group: nothing else in this package imports `torch.distributed`.
Refuses to know who started the processes and how they find each other.

The batch of a step stays the pure function it is: rank r takes its contiguous share of the rows, and every part is
weighted by its samples, so the gradient is the mean over the whole batch however it is shared. With another number of
processes losses agree to rounding; with the same number they agree to the bit, through kill and resume.
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

_PATIENCE = timedelta(days=7)
"""Who waits in a collective is not the one that hangs, and who watches the trainer ends all of it: no second judge."""
_PEER_LOST = ("closed by peer", "reset by peer", "gloo/transport", "NCCL", "Broken pipe", "Connection refused")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train one model; alone, every method does nothing and costs nothing."""

    rank: int = 0
    size: int = 1
    mode: Parallel = "ddp"
    _relay: Any = field(default=None, repr=False, compare=False)
    _wrapped: list[Any] = field(default_factory=list, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only its part of every tensor, so that all must take part in every forward."""
        return self.size > 1 and self.mode == "fsdp"

    def rows(self, batch_size: int) -> slice:
        """Return which rows of a step's batch are this rank's: contiguous, and shares differ by one row at most."""
        return slice(batch_size * self.rank // self.size, batch_size * (self.rank + 1) // self.size)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; all of them must ask, and all hear the same."""
        if self.size == 1:
            return flag
        seen = torch.tensor([int(flag)], dtype=torch.int64)
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        return bool(seen.item())

    def first_says(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers that rank 0 passed; those of the others count for their length only."""
        if self.size == 1:
            return numbers
        said = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(said, src=0)
        return tuple(said.tolist())

    def combine(self, losses: Tensor) -> Tensor:
        """Return the batch's loss of all ranks' weighted parts, (n,) each with an n of its own -> (1,).

        Alone the parts are left as they are.
        """
        if self.size == 1:
            return losses
        total = losses.sum().reshape(1)  # () -> (1,)
        dist.all_reduce(total)
        return total / self.size

    def weight(self, samples: int, global_batch: int) -> float:
        """Return the factor of a part's mean loss, so that the mean of all ranks' gradients is that of the batch."""
        return samples * self.size / global_batch

    def spread(self, model: GPT, device: torch.device) -> None:
        """Make the model one of these: `ddp` averages its gradients, `fsdp` shards it; before its optimizer is made.

        The buckets of `ddp` keep the order they begin with: rebuilt after the first step, as they are by default, more
        than two ranks would round the first step after a resume in another order.
        """
        if self.size == 1:
            return
        if self.mode == "fsdp":
            _shard(model, self.size, device)
            self._wrapped.append(model)
        else:
            self._wrapped.append(nn.parallel.DistributedDataParallel(_Caller(model), find_unused_parameters=True))

    def forward(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function that goes through the model, so that its backward reaches the other ranks."""
        if self.size == 1 or self.is_sharded:
            return function(*arguments)
        result: T = self._wrapped[0](function, *arguments)
        return result

    @contextlib.contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        """Exchange gradients in the backward of the block only where it is the step's last."""
        if self.size == 1:
            yield
        elif self.is_sharded:
            self._wrapped[0].set_requires_gradient_sync(is_last)
            yield
        else:
            with contextlib.nullcontext() if is_last else self._wrapped[0].no_sync():
                yield

    def send_to_first(self, values: Tensor) -> None:
        """Send rank 0 a tensor of the host, in the background's own lane."""
        dist.send(values, dst=0, group=self._relay)

    def receive_from(self, rank: int, values: Tensor) -> None:
        """Fill a tensor of the host with what `rank` sends, in the background's own lane."""
        dist.recv(values, src=rank, group=self._relay)

    def step_seed(self, seed: int, step: int) -> int | None:
        """Return what seeds this rank's dropout in a step; None for rank 0, whose generator is in the train state.

        So a resume with as many ranks draws what it would have drawn, and one with more or fewer is well defined.
        """
        if self.is_first:
            return None
        digest = hashlib.sha256(f"dropout/{seed}/{step}/{self.rank}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


ALONE = Ranks()


def join_ranks(rank: int, size: int, *, mode: Parallel, device: torch.device, store: Store) -> Ranks:
    """Meet the other processes through `store`; what is on the host travels by gloo, what is on a GPU by NCCL."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=_PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
    # Apart from the steps' own exchange, so that a thread in the background may use it.
    return Ranks(rank, size, mode, dist.new_group(backend="gloo", timeout=_PATIENCE))


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor whole; of a sharded one every rank gets all parts, so all must ask for it."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


@torch.no_grad()
def fill(target: Tensor, values: Tensor) -> None:
    """Copy whole values into a tensor, or this rank's part of them into a sharded one; nothing is sent."""
    placements = getattr(target, "placements", None)
    if placements is not None:
        from torch.distributed.tensor import distribute_tensor

        mesh = target.device_mesh  # type: ignore[attr-defined]
        values = distribute_tensor(values.to(target.device), mesh, placements, src_data_rank=None)
    target.copy_(values)


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exception only says that another process is gone: whatever ended that one is the reason."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _PEER_LOST)


class _Caller(nn.Module):
    """Lets DDP see a forward that is more than the model's own, such as one through the fused head."""

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
        register_fsdp_forward_method(block, "extend")
    fully_shard(model, mesh=mesh)
    for method in ("hidden", "extend"):
        register_fsdp_forward_method(model, method)
