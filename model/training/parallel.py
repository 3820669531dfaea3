"""Data-parallel training by threads and processes; the only importer of `torch.distributed` in this package.

Gradients are added along a binary tree over micro-batch indices. Workers, the threads of a process, and replicated
ranks (`ddp`) compute whole subtrees, and the rest is added together, so any number of them gives the same bits. Sharded
ranks (`fsdp`) do for equal numbers.
Sources: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH"; Zhao et al. 2023, "PyTorch
FSDP"; `torch.distributed.fsdp.fully_shard`.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from cairn.model.architectures.gpt import GPT
from cairn.model.architectures.own_network import Network
from cairn.model.configuration.training import Parallel, split_batch
from cairn.model.estimates.size_estimate import exchanged_together

_SWITCH_SECONDS = 0.0002
"""A layer of a small network takes less than the interpreter's own 5 ms, after which it lets another thread go on."""
_PEER_LOSS_MESSAGES = (
    *("closed by peer", "reset by peer", "Gloo connectFullMesh failed", "No route to host", "Connection timed out"),
    *("ncclRemoteError", "remote process has exited", "communicator was aborted", "Broken pipe", "Connection refused"),
)
"""An error of NCCL or gloo that says none of these, such as an invalid usage or two ranks with tensors of different
sizes, is an error of this program or machine.
"""


class TreeSum:
    """Adds lists of equally shaped tensors in index order along the tree; the tensors given are used up.

    Partial sums are kept as in a binary counter: two neighbours of one level become one of the next. Addition of two
    numbers commutes, so partners that exchange their sums agree bit for bit.
    """

    def __init__(self) -> None:
        self._partial: list[tuple[int, list[Tensor]]] = []

    def push(self, tensors: list[Tensor], *, level: int = 0) -> None:
        """Add the next 2**level indices, which the tensors are the sum of."""
        while self._partial and self._partial[-1][0] == level:
            _, left = self._partial.pop()
            torch._foreach_add_(left, tensors)
            tensors, level = left, level + 1
        self._partial.append((level, tensors))

    def total(self) -> list[Tensor]:
        """Return the sum of everything that was pushed; nothing is left."""
        _, total = self._partial.pop()
        while self._partial:
            _, left = self._partial.pop()
            torch._foreach_add_(left, total)
            total = left
        return total


def accumulate(parameters: Sequence[nn.Parameter], backwards: Iterable[Callable[[], None]]) -> None:
    """Run the backward passes in index order and leave the sum of their gradients in `parameters`, which had none.

    Autograd itself adds pairs: two passes need no more memory than one, n need log2(n) - 1 further gradients. A
    parameter that takes no part in a pass, as a module of one's own may have some, has a gradient of zeros.
    """
    tree, passes = TreeSum(), list(backwards)
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    for number, backward in enumerate(passes):
        backward()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        is_odd = number % 2 == 1
        if len(passes) > 2 and (is_odd or number == len(passes) - 1):
            tree.push([parameter.grad for parameter in parameters if parameter.grad is not None], level=int(is_odd))
            for parameter in parameters:
                parameter.grad = None
    if len(passes) > 2:
        for parameter, gradient in zip(parameters, tree.total(), strict=True):
            parameter.grad = gradient


class Workers:
    """Threads of this process that compute micro-batches at once, each by a network of its own over the same weights.

    No bit depends on their number: each adds up whole subtrees of the sum.
    """

    def __init__(self, count: int = 1) -> None:
        """Start none yet."""
        self.count, self._networks = count, list[Network]()
        self._pool = ThreadPoolExecutor(max(1, count - 1), "worker")

    def accumulate(self, model: Network, backward: Callable[[Network, int], None], passes: int) -> None:
        """Run so many backward passes, and leave the sum of their gradients in the model's parameters."""
        level = max(0, (passes // self.count).bit_length() - 1)
        blocks = [range(begin, min(begin + (1 << level), passes)) for begin in range(0, passes, 1 << level)]
        if len(blocks) == 1 or self.count == 1:
            accumulate(list(model.parameters()), (partial(backward, model, number) for number in range(passes)))
            return
        self._prepare(model)
        sums, ahead = dict[int, list[Tensor]](), iter(range(len(blocks)))

        def work(network: Network) -> None:
            parameters = list(network.parameters())
            for number in ahead:  # all workers take from the same
                accumulate(parameters, (partial(backward, network, one) for one in blocks[number]))
                sums[number] = [parameter.grad for parameter in parameters if parameter.grad is not None]
                network.zero_grad(set_to_none=True)

        others = [self._pool.submit(work, network) for network in self._networks]
        try:
            work(model)
        finally:
            wait(others)
        for other in others:
            other.result()
        tree = TreeSum()
        for number, block in enumerate(blocks):
            tree.push(sums.pop(number), level=len(block).bit_length() - 1)
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        for parameter, gradient in zip(trained, tree.total(), strict=True):
            parameter.grad = gradient

    def _prepare(self, model: Network) -> None:
        if not self._networks:
            sys.setswitchinterval(_SWITCH_SECONDS)
            for _ in range(self.count - 1):
                shared: dict[int, Any] = {
                    id(one): nn.Parameter(one.detach(), one.requires_grad) for one in model.parameters()
                }
                self._networks.append(deepcopy(model, shared))


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train one model; with one process every method is a no-op."""

    rank: int = 0
    size: int = 1
    mode: Parallel = "ddp"
    _sharded: list[Any] = field(default_factory=list, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports for all ranks."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only its part of every tensor, so that all must run every forward."""
        return self.size > 1 and self.mode == "fsdp"

    def micro_batches(self, global_batch: int, micro_batch: int) -> tuple[slice, ...]:
        """Return the rows of each micro-batch that this rank computes."""
        return split_batch(global_batch, micro_batch, processes=self.size, mode=self.mode)[self.rank]

    def all_micro_batches(self, global_batch: int, micro_batch: int) -> tuple[slice, ...]:
        """Return the rows of the micro-batches of all ranks, in the order of `gather_losses`."""
        return tuple(chain(*split_batch(global_batch, micro_batch, processes=self.size, mode=self.mode)))

    def rows(self, global_batch: int, micro_batch: int) -> slice:
        """Return this rank's rows of a step's batch, which are contiguous."""
        parts = self.micro_batches(global_batch, micro_batch)
        return slice(parts[0].start, parts[-1].stop)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; a collective call with one answer."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)], dtype=torch.int64)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags.item())

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Overwrite a contiguous tensor on every rank with that of rank `source`; a collective call."""
        if self.size > 1:
            dist.broadcast(tensor, source)

    def gather_losses(self, losses: Tensor, seconds: float) -> tuple[Tensor, Tensor]:
        """Return the weighted losses of all micro-batches (n,), of which this rank has an equal share, and all seconds.

        The seconds (ranks,) are those that each rank worked on a step by itself; none of one rank, or of sharded ones,
        which wait for each other in every layer.
        """
        if self.size == 1:
            return losses, losses[:0]
        every = losses.new_empty(self.size * (len(losses) + 1))
        dist.all_gather_single(every, torch.cat((losses, losses.new_full((1,), seconds))))
        rows = every.view(self.size, -1)
        return rows[:, :-1].flatten(), rows[: 0 if self.is_sharded else self.size, -1]

    @torch.no_grad()
    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace the gradients of replicated ranks by their sum over all ranks, added along the tree.

        Each rank sums one part of everybody's gradients in the order of ranks and sends it to all, as in a ring.
        """
        if self.size == 1 or self.is_sharded:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for together in exchanged_together([gradient.nbytes for gradient in gradients]):
            bucket = gradients[together]
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])  # (N,)
            padded = nn.functional.pad(flat, (0, -len(flat) % self.size))  # (size * part,)
            received = torch.empty_like(padded)
            dist.all_to_all_single(received, padded)
            tree = TreeSum()
            for part in received.chunk(self.size):
                tree.push([part])
            dist.all_gather_single(padded, tree.total()[0])
            for gradient, values in zip(bucket, padded[: len(flat)].split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(values.view_as(gradient))

    def wrap(self, model: GPT, device: torch.device, dtype: torch.dtype | None) -> None:
        """Shard the model among the ranks, before its optimizer is made; replicated ranks each keep it whole.

        Layers are gathered in `dtype`, that of autocast, and else as they are kept, in fp32.
        """
        if not self.is_sharded:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        mesh, model.gathered_dtype = init_device_mesh(device.type, (self.size,)), dtype
        # The residual stream stays in fp32, and so do the embeddings, whose gradients are added up over many tokens.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.h:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)
        for method in ("hidden", "extend"):
            register_fsdp_forward_method(model, method)
        self._sharded.append(model)

    def synchronize(self, *, is_last: bool) -> None:
        """Have sharded ranks exchange gradients in the next backward pass, which they need to only in a step's last."""
        if self.is_sharded:
            self._sharded[0].set_requires_gradient_sync(is_last)


SINGLE_RANK = Ranks()


def join_ranks(rank: int, size: int, *, mode: Parallel, device: torch.device, store: Store) -> Ranks:
    """Join the process group through `store`; host tensors use gloo, GPU tensors NCCL."""
    backend, gpu = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
    week = timedelta(days=7)  # never reached: the watchdog of the trainer detects hangs and ends all ranks
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=week, device_id=gpu)
    return Ranks(rank, size, mode)


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


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exception only reports that another process is gone, whose own error is then the cause."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _PEER_LOSS_MESSAGES)
