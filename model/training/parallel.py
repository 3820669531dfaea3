"""Data-parallel training by processes; the only importer of `torch.distributed` in this package, but for its stores.

Replicated ranks (`ddp`) compute whole subtrees of the sum over micro-batches (`gradient_sum`), and the rest is added
together, so any number of them gives the same bits. Sharded ranks (`fsdp`) do for equal numbers.
Sources: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH"; Zhao et al. 2023, "PyTorch
FSDP"; `torch.distributed.fsdp.fully_shard`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store

from cairn.model.architectures.gpt import GPT
from cairn.model.configuration.training import Parallel, split_batch
from cairn.model.errors import StateMismatch
from cairn.model.estimates.size_estimate import exchanged_together
from cairn.model.training import membership
from cairn.model.training.gradient_sum import TreeSum
from cairn.model.training.membership import MeetingPlace, SharesChanged

_PEER_LOSS_MESSAGES = (
    *("closed by peer", "reset by peer", "Gloo connectFullMesh failed", "No route to host", "Connection timed out"),
    *("ncclRemoteError", "remote process has exited", "communicator was aborted", "Broken pipe", "Connection refused"),
)
"""An error of NCCL or gloo that says none of these, such as an invalid usage or two ranks with tensors of different
sizes, is an error of this program or machine.
"""
_WEEK = timedelta(days=7)
"""The limit of a collective call, never reached: the watchdog of the trainer detects hangs and ends all ranks."""
_CONNECT_SECONDS = 2.0
_MOST_MEETINGS = 20
_POLL_SECONDS = 0.02


@dataclass(slots=True, eq=False)
class Ranks:
    """This process among those that train one model; with one process every method is a no-op.

    With a `place` to meet again, replicated ranks go on without one that is lost, and let others join: `rank` and
    `size` are then those among the `members`, which are named by the rank they began as.
    """

    rank: int = 0
    size: int = 1
    mode: Parallel = "ddp"
    place: MeetingPlace | None = None
    members: tuple[int, ...] = ()
    position: membership.Position = field(default_factory=membership.Position)
    meeting: membership.MeetingNumber = (0, 0)
    admissions: int = 0
    met_admissions: int = 0
    _sharded: list[Any] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.members = self.members or tuple(range(self.size))
        if self.position == membership.Position():
            self.position = replace(self.position, members=self.members)

    @property
    def own(self) -> int:
        """The rank that this process began as, which nobody else gets."""
        return self.members[self.rank]

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports for all ranks."""
        return self.own == 0

    @property
    def has_state(self) -> bool:
        """Whether it has taken part in a round: one that joins others has not until it has their state."""
        return self.own in self.position.members

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only its part of every tensor, so that all must run every forward."""
        return self.size > 1 and self.mode == "fsdp"

    def shares(self, global_batch: int, micro_batch: int) -> tuple[tuple[slice, ...], ...]:
        """Return, by rank, the rows of each of its micro-batches."""
        if self.meeting == (0, 0):
            return split_batch(global_batch, micro_batch, processes=self.size, mode=self.mode)
        (every,) = split_batch(global_batch, micro_batch)
        return tuple(every[share.start : share.stop] for share in membership.share_passes(len(every), self.size))

    def micro_batches(self, global_batch: int, micro_batch: int) -> tuple[slice, ...]:
        """Return the rows of each micro-batch that this rank computes."""
        return self.shares(global_batch, micro_batch)[self.rank]

    def all_micro_batches(self, global_batch: int, micro_batch: int) -> tuple[slice, ...]:
        """Return the rows of the micro-batches of all ranks, in the order of `gather_losses`."""
        return tuple(chain(*self.shares(global_batch, micro_batch)))

    def rows(self, global_batch: int, micro_batch: int) -> slice:
        """Return this rank's rows of a step's batch, which are contiguous."""
        parts = self.micro_batches(global_batch, micro_batch)
        return slice(parts[0].start, parts[-1].stop)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; see `largest`."""
        return bool(self.largest(flag))

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers; a collective call with one answer, whichever ranks are lost."""
        while (answer := self._largest(number)) is None:
            continue
        return answer

    def any_in_step(self, flag: bool) -> bool:
        """Whether it is set on any before a step's sum is complete; raises SharesChanged if a rank is lost."""
        meeting, answer = self.meeting, self._largest(flag)
        if answer is None or self.meeting != meeting:
            raise SharesChanged
        return bool(answer)

    def is_waited_for(self) -> bool:
        """Whether others wait to join; only rank 0 knows."""
        return self.place is not None and self.is_first and bool(self.place.members().waiting)

    def admit(self, hand_over: Callable[[], None], digest: Callable[[], Tensor]) -> None:
        """Let in those who wait: `hand_over` gives them the state of rank 0, whose `digest` (1,) all must have then.

        A collective call between two steps, once all have agreed to it; raises StateMismatch for another digest.
        """
        assert self.place is not None
        self.admissions += 1
        if self.is_first:
            self.place.admit(self.admissions)
        while self.met_admissions < self.admissions:  # rank 0 may have yet to learn that all have agreed
            self.place.mark(self.own, is_waiting=True)
            self.attend()
            time.sleep(_POLL_SECONDS)
        self._take_in(hand_over, digest)

    def join(self, hand_over: Callable[[], None], digest: Callable[[], Tensor]) -> None:
        """Wait, as a rank that is at NOWHERE, to be let in by the others, and take over their state as in `admit`."""
        assert self.place is not None
        self.place.wait_for_admission(self.own)
        self._meet(self.place, DistNetworkError("the other ranks have ended"))
        self.admissions = self.met_admissions
        self._take_in(hand_over, digest)

    def _take_in(self, hand_over: Callable[[], None], digest: Callable[[], Tensor]) -> None:
        """Hand over the state until all members have it: the round at the end is the first of the newcomers."""
        while membership.newcomers(self.members, self.position):
            if not self._exchange(hand_over):
                continue
            every = torch.zeros(self.size, dtype=torch.int64)
            is_known = self._agree(every, partial(dist.all_gather_single, every, digest()))
            if is_known and len(found := set(every.tolist())) > 1:
                raise StateMismatch(f"ranks have other bits after a state was handed over: {len(found)} digests")

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        """Send contiguous host tensors from rank 0 to the newcomers among the members, which receive them in place."""
        to = [self.members.index(rank) for rank in membership.newcomers(self.members, self.position)]
        for tensor in tensors:
            flat = tensor.detach().reshape(-1).view(torch.uint8)  # its shape -> (bytes,)
            for rank in to if self.is_first else ():
                dist.send(flat, rank)
            if self.rank in to:
                dist.recv(flat, 0)

    def attend(self) -> None:
        """Meet the others if they wait for it: for a rank that waits for work, and so takes part in no exchange."""
        if self.place is not None and self.place.is_due(self.meeting):
            self._meet(self.place, DistNetworkError("the other ranks have not come"))

    def _largest(self, number: int) -> int | None:
        if self.size == 1:
            return number
        numbers = torch.tensor([int(number)], dtype=torch.int64)
        is_known = self._agree(numbers, partial(dist.all_reduce, numbers, dist.ReduceOp.MAX))
        return int(numbers) if is_known else None

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Overwrite a contiguous tensor on every rank with that of rank `source`; a collective call."""
        if self.size > 1:
            dist.broadcast(tensor, source)

    def gather_losses(self, losses: Tensor, seconds: float, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the weighted losses of all micro-batches (n,), of which each rank has so many, and all seconds.

        The seconds (ranks,) are those that each rank worked on a step by itself; none of one rank, or of sharded ones,
        which wait for each other in every layer. Raises SharesChanged if a rank is lost and none has all losses; else
        every rank has the step's whole sum, and updates its weights.
        """
        if self.size == 1:
            return losses, losses[:0]
        size, most = self.size, max(counts)
        own = torch.cat((losses, losses.new_zeros(most - len(losses)), losses.new_full((1,), seconds)))
        every = losses.new_empty(size * (most + 1))
        if not self._agree(every, partial(dist.all_gather_single, every, own)):
            raise SharesChanged
        rows = every.view(size, -1)
        gathered = torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])
        return gathered, rows[: 0 if self.is_sharded else size, -1]

    def add_up(self, parameters: Sequence[nn.Parameter], counts: Sequence[int]) -> None:
        """Replace the gradients of replicated ranks by their sum over all ranks, added along the tree.

        Each rank, with so many micro-batches, sums one part of everybody's gradients in the order of ranks and sends it
        to all, as in a ring. Raises SharesChanged if a rank is lost.
        """
        if self.size == 1 or self.is_sharded:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not self._exchange(partial(self._add_up, gradients, [count.bit_length() - 1 for count in counts])):
            raise SharesChanged

    @torch.no_grad()
    def _add_up(self, gradients: Sequence[Tensor], levels: Sequence[int]) -> None:
        for together in exchanged_together([gradient.nbytes for gradient in gradients]):
            bucket = gradients[together]
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])  # (N,)
            padded = nn.functional.pad(flat, (0, -len(flat) % self.size))  # (size * part,)
            received = torch.empty_like(padded)
            dist.all_to_all_single(received, padded)
            tree = TreeSum()
            for part, level in zip(received.chunk(self.size), levels, strict=True):
                tree.push([part], level=level)
            dist.all_gather_single(padded, tree.total()[0])
            for gradient, values in zip(bucket, padded[: len(flat)].split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(values.view_as(gradient))

    def _agree(self, result: Tensor, exchange: Callable[[], object]) -> bool:
        """Fill `result` in one round; return False if ranks were lost in it and no rank knows the result."""
        before = self.position.rounds
        if self._exchange(exchange):
            data = result.cpu().numpy().tobytes() if self.place else b""
            self.position = membership.Position(rounds=before + 1, result=data, members=self.members)
        elif self.position.rounds > before:
            result.copy_(torch.frombuffer(bytearray(self.position.result), dtype=result.dtype))
        return self.position.rounds > before

    def _exchange(self, exchange: Callable[[], object]) -> bool:
        """Run collective calls; if a rank is lost in them, meet the others again and return False."""
        if self.place is None:
            exchange()
            return True
        self.place.mark(self.own, is_waiting=True)
        try:
            exchange()
        except RuntimeError as error:
            if not is_peer_loss(error):
                raise
            loss = error.with_traceback(None)  # which would keep the connections open
        else:
            return True
        finally:
            self.place.mark(self.own, is_waiting=False)
        self._meet(self.place, loss)
        return False

    def _meet(self, place: MeetingPlace, loss: RuntimeError) -> None:
        """Meet all ranks that are left, and go on from the newest position; raises the loss if they do not connect."""
        own = self.own
        place.mark(own, is_waiting=True)
        for number in range(_MOST_MEETINGS):
            if dist.is_initialized():
                dist.destroy_process_group()
            met = place.members()
            if own not in (members := met.ranks):
                raise loss  # the end of all has begun
            self.meeting = membership.next_meeting(self.meeting, met.changes)
            if (positions := place.exchange(self.meeting, own, self.position)) is None:
                continue  # another one is lost
            limit = timedelta(seconds=_CONNECT_SECONDS + number)
            try:
                _connect("gloo", place.store(self.meeting), members.index(own), len(members), limit)
            except (RuntimeError, TimeoutError):
                if not dist.is_initialized():  # torch counts groups, by which it names exchanges: from 0 again
                    _connect("gloo", dist.HashStore(), 0, 1, _WEEK)  # type: ignore[attr-defined]
                continue
            self.rank, self.size, self.members = members.index(own), len(members), members
            self.met_admissions = met.admissions
            self.position = membership.newest_position(positions)
            if self.size == 1:  # which has no more rounds
                self.position = replace(self.position, members=members)
            place.mark(own, is_waiting=False)
            return
        raise loss

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


def join_ranks(
    rank: int, size: int, *, mode: Parallel, device: torch.device, store: Store, place: MeetingPlace | None = None
) -> Ranks:
    """Join the process group through `store`; host tensors use gloo, GPU tensors NCCL.

    Replicated ranks of gloo that have a `place` meet there again when one is lost.
    """
    is_cuda = device.type == "cuda"
    _connect("cpu:gloo,cuda:nccl" if is_cuda else "gloo", store, rank, size, _WEEK, device if is_cuda else None)
    return Ranks(rank, size, mode, None if is_cuda or mode == "fsdp" else place)


def _connect(
    backend: str, store: Store, rank: int, size: int, limit: timedelta, device: torch.device | None = None
) -> None:
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=device)
    if limit != _WEEK:
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(_WEEK)


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exception only reports that another process is gone, whose own error is then the cause."""
    if isinstance(error, (DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _PEER_LOSS_MESSAGES)
