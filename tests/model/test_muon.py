"""Muon's batched update beside torch's own, which moves whole matrices one by one."""

import pytest
import torch
from torch.optim import Muon

from cairn.model.training.optimizer import orthogonalize, update_matrices

SHAPES = [(24, 8), (8, 24), (12, 12), (12, 12)]


def matrices() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


def optimizer_of(parameters: list[torch.Tensor], rows: list[tuple[int, ...]]) -> Muon:
    made = Muon([{"params": parameters, "rows": rows}], lr=0.02, weight_decay=0.1, momentum=0.95)
    for parameter in parameters:
        made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return made


def give_gradients(parameters: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_steps_are_torchs_up_to_half_precision() -> None:
    ours, theirs = matrices(), matrices()
    optimizer, reference = optimizer_of(ours, [shape[:1] for shape in SHAPES]), Muon(theirs, lr=0.02, weight_decay=0.1)
    for step in range(3):
        for parameters in (ours, theirs):
            give_gradients(parameters, step)
        with torch.no_grad():
            update_matrices(optimizer)
        reference.step()
    for found, wanted, began in zip(ours, theirs, matrices(), strict=True):
        assert (found - wanted).norm() < 0.02 * (wanted - began).norm()
        torch.testing.assert_close(
            optimizer.state[found]["momentum_buffer"], reference.state[wanted]["momentum_buffer"]
        )


def test_joined_matrices_move_as_they_would_apart() -> None:
    apart = matrices()[2:]
    joined = torch.cat([part.detach() for part in apart]).requires_grad_()
    give_gradients(apart, 1)
    joined.grad = torch.cat([part.grad for part in apart])  # type: ignore[misc]
    with torch.no_grad():
        update_matrices(optimizer_of(apart, [(12,), (12,)]))
        update_matrices(optimizer_of([joined], [(12, 12)]))
    assert torch.equal(joined, torch.cat(apart))


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    made = orthogonalize(matrix, (3.4445, -4.7750, 2.0315), steps=5, epsilon=1e-7).float()
    found = torch.linalg.svdvals(made)
    assert found.min() > 0.3 and found.max() < 1.5


def test_a_blocked_update_changes_nothing_even_where_gradients_are_not_numbers() -> None:
    parameters = matrices()
    optimizer = optimizer_of(parameters, [shape[:1] for shape in SHAPES])
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    with torch.no_grad():
        update_matrices(optimizer)
    assert all(torch.equal(found, began) for found, began in zip(parameters, matrices(), strict=True))
    assert all(optimizer.state[parameter]["momentum_buffer"].eq(0).all() for parameter in parameters)
