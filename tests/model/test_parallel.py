"""Rows, loss weights and dropout seeds of ranks, and which errors only report that another rank is gone."""

import pytest
import torch

from model.training.determinism import Generators
from model.training.parallel import SINGLE_RANK, Ranks, copy_into, gather_full, is_peer_loss


@pytest.mark.parametrize(("batch", "size"), [(8, 1), (8, 3), (7, 7), (12, 5)])
def test_every_row_belongs_to_one_rank_and_shares_differ_by_at_most_one(batch: int, size: int) -> None:
    shares = [list(range(batch))[Ranks(rank, size).rows(batch)] for rank in range(size)]
    assert [row for share in shares for row in share] == list(range(batch))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1 and min(map(len, shares)) >= 1


def test_the_mean_of_the_ranks_weighted_parts_is_the_mean_of_the_batch() -> None:
    values, size = torch.randn(7, dtype=torch.float64), 3
    parts = [values[Ranks(rank, size).rows(7)] for rank in range(size)]
    weighted = [part.mean() * Ranks(0, size).loss_weight(len(part), 7) for part in parts]
    assert torch.stack(weighted).mean() == pytest.approx(values.mean().item())


def test_a_single_rank_exchanges_nothing_and_changes_no_bit() -> None:
    losses = torch.tensor([1.0, 2.0])
    assert SINGLE_RANK.combine(losses) is losses and SINGLE_RANK.loss_weight(4, 8) == 0.5
    assert SINGLE_RANK.any(True) and not SINGLE_RANK.any(False) and SINGLE_RANK.broadcast((1, 2)) == (1, 2)
    assert SINGLE_RANK.forward(max, 1, 2) == 2


def test_rank_0_uses_the_train_states_generator_and_other_ranks_a_seed_for_each_step() -> None:
    assert Ranks(0, 2).dropout_seed(7, 3) is None
    seeds = {Ranks(rank, 3).dropout_seed(seed, step) for rank in (1, 2) for seed in (7, 8) for step in (3, 4)}
    assert len(seeds) == 8 and all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds)
    assert Ranks(1, 2).dropout_seed(7, 3) == Ranks(1, 4).dropout_seed(7, 3)


def test_reseeded_generators_draw_the_same_and_leave_the_processs_own_alone() -> None:
    device, before = torch.device("cpu"), torch.get_rng_state()
    drawn = []
    for _ in range(2):
        generators = Generators(cpu=torch.get_rng_state(), cuda=None)
        generators.reseed(5, device)
        with generators.activate(device):
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn) and torch.equal(torch.get_rng_state(), before)


def test_an_unsharded_tensor_is_gathered_and_copied_unchanged() -> None:
    target = torch.zeros(2, 3)
    copy_into(target, torch.ones(2, 3))
    assert gather_full(target) is target and float(target.sum()) == 6


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:31337"), True),
        (RuntimeError("gloo/transport/tcp/pair.cc: Read error: Connection reset by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (MemoryError("out of memory"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # a store's, not a rank's
    ],
)
def test_only_a_failed_exchange_is_a_peer_loss(error: BaseException, is_consequence: bool) -> None:
    assert is_peer_loss(error) is is_consequence
