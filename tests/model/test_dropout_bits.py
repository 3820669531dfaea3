"""Dropout by bits: the share that survives, its scale, and that the same generator draws the same."""

import pytest
import torch

from cairn.model.kernels.attention import apply_keep_mask, draw_keep_mask


@pytest.mark.parametrize("dropout", [0.1, 0.2, 0.5, 0.9])
def test_the_share_that_survives_is_the_chance_to(dropout) -> None:
    torch.manual_seed(1)
    survivors = draw_keep_mask((1000, 999), dropout)
    assert set(survivors.unique().tolist()) == {0, -1}
    assert (survivors != 0).float().mean().item() == pytest.approx(1.0 - dropout, abs=0.003)


def test_every_row_and_every_column_is_drawn_by_itself() -> None:
    torch.manual_seed(2)
    alive = (draw_keep_mask((400, 402), 0.5) != 0).float()
    assert (alive.T.corrcoef() - torch.eye(402)).abs().max() < 0.3
    assert (alive.corrcoef() - torch.eye(400)).abs().max() < 0.3


def test_what_survives_is_scaled_to_keep_the_sum() -> None:
    torch.manual_seed(3)
    ones = torch.ones(1000, 100, dtype=torch.bfloat16)
    left = apply_keep_mask(ones, draw_keep_mask(ones.shape, 0.2), 0.2)
    assert set(left.unique().tolist()) == {0.0, 1.25}
    assert torch.equal(ones, torch.ones_like(ones))


def test_the_process_generator_decides() -> None:
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(draw_keep_mask((7, 13), 0.5))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
