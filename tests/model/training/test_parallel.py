"""One rank alone, and which errors only report that another rank is gone."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cairn.model.configuration.training import Parallel
from cairn.model.training import parallel
from cairn.model.training.parallel import SINGLE_RANK, is_peer_loss
from cairn.model.training.sharded_tensors import copy_into, gather_full, local_rows


def test_a_single_rank_exchanges_nothing_and_changes_no_bit() -> None:
    losses = torch.tensor([1.0, 2.0])
    gathered, seconds = SINGLE_RANK.gather_losses(losses, 0.5, [2])
    assert gathered is losses and seconds.tolist() == []
    assert SINGLE_RANK.any(True) and not SINGLE_RANK.any(False)
    assert SINGLE_RANK.rows(9, 4) == slice(0, 9)


@pytest.mark.parametrize(
    ("device", "mode", "can_go_on"), [("cpu", "ddp", True), ("cpu", "fsdp", False), ("cuda", "ddp", False)]
)
def test_only_replicated_ranks_of_gloo_go_on_without_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, device: str, mode: Parallel, can_go_on: bool
) -> None:
    asked, place = list[Any](), cast(Any, object())
    monkeypatch.setattr(parallel, "_connect", lambda *given: asked.append(given))
    ranks = parallel.join_ranks(1, 2, mode=mode, device=torch.device(device), store=cast(Any, "store"), place=place)
    assert (ranks.place is place) is can_go_on and ranks.members == (0, 1)
    backend, gpu = ("cpu:gloo,cuda:nccl", torch.device("cuda")) if device == "cuda" else ("gloo", None)
    assert asked == [(backend, "store", 1, 2, timedelta(days=7), gpu)]


def test_ranks_that_cannot_go_on_raise_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*given: object) -> None:
        raise RuntimeError("NCCL error: remote process has exited")

    monkeypatch.setattr(parallel.dist, "all_reduce", lose)
    with pytest.raises(RuntimeError, match="has exited"):
        parallel.Ranks(1, 2).any(False)


def test_an_unsharded_tensor_is_gathered_and_copied_unchanged() -> None:
    target = torch.zeros(2, 3)
    copy_into(target, torch.ones(2, 3))
    assert gather_full(target) is target and float(target.sum()) == 6


@pytest.mark.parametrize(("rows", "size"), [(8, 2), (7, 3), (2, 3), (1, 4)])
def test_the_rows_of_a_sharded_rank_are_where_torch_cuts_them(rows: int, size: int) -> None:
    whole = torch.arange(rows * 2.0).view(rows, 2)
    for rank in range(size):
        part = [*whole.chunk(size), *[whole[:0]] * size][rank]
        mesh = SimpleNamespace(size=lambda: size, get_local_rank=lambda rank=rank: rank)
        sharded: Any = SimpleNamespace(
            placements=(), device_mesh=mesh, shape=whole.shape, to_local=lambda part=part: part
        )
        local, first = local_rows(sharded)
        assert torch.equal(whole[first : first + len(local)], part)


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:31337"), True),
        (RuntimeError("gloo/transport/tcp/pair.cc: Read error: Connection reset by peer"), True),
        (RuntimeError("[pair.cc:537] Read error [127.0.0.1]:5602: No route to host"), True),
        (RuntimeError("Gloo connectFullMesh failed with [pair.cc:144] timed out connecting"), True),
        (
            RuntimeError(
                "[enforce fail at third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. "
                "4000 vs 4. Is there a distributed collective mismatch in your code?"
            ),
            False,
        ),
        (RuntimeError("ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (4), got (3))"), False),
        (RuntimeError("NCCL error: remote process exited\nncclRemoteError: A call failed possibly"), True),
        (RuntimeError("NCCL error: invalid usage\nncclInvalidUsage: This usually reflects invalid usage"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (MemoryError("out of memory"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # a store's, not a rank's
    ],
)
def test_only_a_failed_exchange_is_a_peer_loss(error: BaseException, is_consequence: bool) -> None:
    assert is_peer_loss(error) is is_consequence
